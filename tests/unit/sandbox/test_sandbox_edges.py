"""Attacks on the channel of cells, on the removal of boxes, and on resources that the kernel does not limit."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from pathlib import Path

import pytest

from rollout.sandbox import RunLimits, Sandbox, Verdict, cgroup
from rollout.sandbox.guest import box as guest_box
from rollout.sandbox.guest import filters, linux, wire
from rollout.sandbox.guest.box import remove_tree
from rollout.sandbox.guest.warden import Warden
from tests.support.sandboxes import LIMITS, run, started

CHANNEL = (
    "import os, socket, time\nhost = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, 3)\n"
)
INVALID_ANSWERS = {
    "empty": b"",
    "words": b"all is well",
    "list": b"[1]",
    "number": b"5",
    "bytes": b"\xff\xfe\xfd",
    "no error": b'{"done": true}',
    "no token": b'{"error": ""}',
    "a token of no cell": b'{"error": "", "token": "0"}',
    "a token that is a list": b'{"error": "", "token": []}',
    "long": b"x" * 60_000,
    "deep": b"[" * 60_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", INVALID_ANSWERS)
def test_a_cell_that_sends_an_answer_itself_fails_and_the_next_one_runs(
    box: Sandbox, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.sandbox.session._INTERRUPT_S", 0.1)  # the cell does not react

    async def cells() -> None:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            started_s = time.monotonic()
            result = await session.run(
                f"{CHANNEL}host.send({INVALID_ANSWERS[kind]!r})\ntime.sleep(60)"
            )
            assert result.verdict is Verdict.RE
            assert time.monotonic() - started_s < 20
            after = await session.run("1 + 1")
            assert (after.stdout, after.fresh) == ("2\n", True)

    asyncio.run(cells())


def test_descriptors_that_a_cell_sends_are_dropped(box: Sandbox) -> None:
    source = f'{CHANNEL}socket.send_fds(host, [b\'{{"error": ""}}\'], [1] * 8)\ntime.sleep(60)'

    async def cells() -> None:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            await session.run("1")
            before = len(list(Path("/proc/self/fd").iterdir()))
            for _ in range(3):
                assert (await session.run(source)).verdict in (
                    Verdict.OK,
                    Verdict.RE,
                )  # it deceives only itself
                session.end()
                await session.run("1")
            assert len(list(Path("/proc/self/fd").iterdir())) == before

    asyncio.run(cells())


FORGED_ANSWERS = {
    "without token": 'answer = b\'{"error": ""}\'',
    "with another token": 'answer = b\'{"error": "", "token": "0"}\'',
    # the token of the cell, from the function that runs the cells
    "with its token": (
        "import json, sys\nframe = sys._getframe()\n"
        "while 'request' not in frame.f_locals: frame = frame.f_back\n"
        "answer = json.dumps({'error': '', **frame.f_locals['request']}).encode()"
    ),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", FORGED_ANSWERS)
def test_a_forged_answer_does_not_become_that_of_a_later_cell(
    box: Sandbox, kind: str, count: int
) -> None:
    forging = f"{CHANNEL}{FORGED_ANSWERS[kind]}\nfor _ in range({count}): host.send(answer)\nhost.detach()"

    async def cells() -> list[tuple[str, str]]:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            await session.run(f"{forging}\nraise ValueError")
            sources = ("print('second')", "raise KeyError", "print('fourth')")
            results = [await session.run(source) for source in sources]
        return [(result.verdict, result.stdout.strip()) for result in results]

    expected = [(Verdict.OK, "second"), (Verdict.RE, ""), (Verdict.OK, "fourth")]
    assert asyncio.run(cells()) == expected


DEEP = """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
print("deep")
"""


def test_deep_folders_are_removed_and_do_not_disturb_other_runs(box: Sandbox) -> None:
    result = run(box, DEEP + "import time\ntime.sleep(2)")
    assert result.verdict is (Verdict.OK if box.tier == "namespaces" else Verdict.OLE)
    again = started(box.tier)  # removes what earlier sandboxes have left
    try:
        assert run(again, "print(1)").stdout == "1\n"
    finally:
        again.close()
    boxes = box.pool.boxes if box.pool else None
    if boxes is not None:
        deadline = time.monotonic() + 20
        while any(boxes.glob("*/*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not list(boxes.glob("*/*"))


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "box"
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=folder)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        inner = os.open("deeper", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    (tmp_path / "kept").mkdir()
    (top / "link").symlink_to(tmp_path / "kept")
    assert remove_tree(str(top))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert remove_tree(str(tmp_path / "not there"))
    (tmp_path / "file").touch()
    assert not remove_tree(str(tmp_path / "file"))  # only folders are removed


def test_a_file_with_a_link_outside_keeps_its_mode(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    outside.chmod(0o400)
    top = tmp_path / "top"
    top.mkdir()
    for depth in range(1, 1200):  # deeper than shutil.rmtree can remove
        top.joinpath(*["d"] * depth).mkdir()
    os.link(outside, top / "link")
    assert remove_tree(str(top))
    assert outside.stat().st_mode & 0o777 == 0o400
    assert outside.read_text() == "mine"


LONG_NAMES = """
import os
for n in range(1900):
    if n % 100 == 0:
        folder = f"{n:04}"
        os.mkdir(folder)
    else:
        open(f"{folder}/{n:04}" + "\\x01" * 240, "w").close()
open(b"\\xff.csv", "w").close()
"""


def test_long_and_undecodable_names_are_listed(box: Sandbox) -> None:
    async def cells() -> None:
        async with box.session(RunLimits(wall_s=30, memory_mb=256)) as session:
            assert (await session.run(LONG_NAMES)).verdict is Verdict.OK
            files = await session.files()
            assert len(files) == 1900 - 19 + 1
            assert await session.get("\udcff.csv") == b""
            with pytest.raises(ValueError, match="cannot be encoded"):
                await session.get("\ud800")

    asyncio.run(cells())


def test_unlinked_open_files_count_in_the_landlock_tier() -> None:
    box = started("landlock")
    source = """
import os, time
files = []
for n in range(55):
    file = open("f", "wb")
    os.unlink("f")
    file.write(b"x" * (16 << 20))
    file.flush()
    files.append(file)
    print(n, flush=True)
    time.sleep(0.02)
time.sleep(20)
"""
    try:
        result = run(
            box, source, RunLimits(wall_s=30, cpu_s=20, disk_mb=64, memory_mb=256, open_files=64)
        )
        assert result.verdict is Verdict.OLE
        assert len(result.stdout.splitlines()) < 40  # of 55; the warden checks every 0.1 s
    finally:
        box.close()


def test_threads_count_in_the_landlock_tier() -> None:
    box = started("landlock")
    source = """
import threading, time
threading.stack_size(32 << 10)
for _ in range(1000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(0.002)
print("all")
"""
    try:
        result = run(box, source, RunLimits(wall_s=30, memory_mb=256, processes=32))
        assert (result.verdict, result.stdout) == (Verdict.RE, "")
    finally:
        box.close()


SIBLINGS = """
import os, time
for _ in range({count} - 1):
    if os.fork() == 0:
        break
x = bytearray(b"1") * ({mb} << 20)
time.sleep({seconds})
"""


@pytest.mark.slow
def test_the_memory_of_a_tree_is_bounded_without_control_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "writable_parents", lambda: None)
    box = started("namespaces")
    limits = RunLimits(wall_s=30, memory_mb=256, processes=32)
    try:
        assert box.pool is not None and box.pool.groups is None
        started_s = time.monotonic()
        result = run(box, SIBLINGS.format(count=12, mb=100, seconds=20), limits)
        assert result.verdict is Verdict.MLE
        assert time.monotonic() - started_s < 15
        shared = "x = bytearray(b'1') * (150 << 20)\n" + SIBLINGS.format(count=8, mb=1, seconds=0.5)
        assert run(box, shared, limits).verdict is Verdict.OK  # pages that a fork shares count once
    finally:
        box.close()


@pytest.mark.parametrize("version", [1, 2])
def test_landlock_that_lets_files_be_truncated_is_refused(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "call", lambda *_: version)
    with pytest.raises(
        OSError, match=rf"Landlock is version {version}; version 3 \(Linux 6.2\)"
    ) as error:
        filters.confine_files(readable=[], writable=[])
    assert error.value.errno == errno.ENOSYS


def test_a_file_outside_is_not_truncated(box: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("kept")
    result = run(
        box,
        f"import os\ntry: os.truncate({str(file)!r}, 0)\nexcept OSError: print('refused')",
        LIMITS,
    )
    assert (result.stdout, file.read_text()) == ("refused\n", "kept")


@pytest.mark.parametrize("tier", ["landlock", "unisolated"])
def test_a_full_disk_of_the_machine_ends_the_warden(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file is not refused, because it is not too large for its box."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(guest_box, "put", fail)
    host_end, warden_end = wire.pair()
    with host_end, warden_end, Path(os.devnull).open("rb") as content:
        wire.send(host_end, {"do": "put", "name": "a"}, [content.fileno()])
        host_end.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="No space left on device"):
            Warden(warden_end, {"tier": tier}, "")._serve()
