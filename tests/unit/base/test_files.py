"""One owner per folder; files complete or absent."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.base import ownership
from rollout.base.files import read_yaml, writable, write_text
from rollout.base.ownership import FolderError, epoch_of, owned


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is there twice.*line 3, column 1"),
        ("runs:\n- {a: 1, b: 2}\n- {a: 1, a: 1}\n", "key 'a' is there twice.*line 3, column 10"),
        ("{1: a, '1': b, 1.0: c}", None),  # an integer, a text, a number
        ("one: {x: &a {<<: {k: 0, j: 1}, k: 1}}\ntwo: {<<: *a, k: 3}\n", None),
    ],
)
def test_a_key_has_one_value(tmp_path: Path, text: str, place: str | None) -> None:
    (tmp_path / "a.yaml").write_text(text)
    if place is None:
        assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)
        return
    with pytest.raises(yaml.YAMLError, match=place):
        read_yaml(tmp_path / "a.yaml")


def test_a_living_owner_keeps_its_folder(tmp_path: Path) -> None:
    with owned(tmp_path):
        said = f"in use by process {os.getpid()} on '{socket.gethostname()}' since 20"
        with pytest.raises(FolderError, match=said), owned(tmp_path):
            pass
    with owned(tmp_path):
        pass


@pytest.mark.parametrize(
    "record",
    [
        "",
        "null",
        "[1]",
        '{"pid": 1}',
        '{"host": "x"}',
        '{"host": "els',
        "[" * 9000,
        "\udcff",
        '{"pid": "y"}',
    ],
)
def test_what_the_record_says_decides_nothing(tmp_path: Path, record: str) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(record, errors="surrogateescape")
    os.utime(lock, (1, 1))  # long without a sign of life
    with owned(tmp_path):  # nobody holds it, whoever is written there
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        lock.write_text(record, errors="surrogateescape")
        with (
            pytest.raises(FolderError, match=r"in use by another process; stop it first$"),
            owned(tmp_path),
        ):
            pass


CONTAINED = [
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
]  # numbers of processes begin at 1 there; the host's name stays


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a namespace")
def test_a_container_of_the_same_host_name_owns_a_folder_as_long_as_it_lives(
    tmp_path: Path,
) -> None:
    """Its owner is process 1, of which there is another one here, who lives when the owner is dead."""
    with subprocess.Popen(
        [*CONTAINED, sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None and int(owner.stdout.readline()) > 0
        assert (
            json.loads((tmp_path / "lock.json").read_text())["pid"] == 1
            and Path("/proc/1").is_dir()
        )
        for elsewhere in ([], CONTAINED):  # from here, and from another container
            contender = [*elsewhere, sys.executable, "-c", OWNER, str(tmp_path)]
            refused = subprocess.run(
                contender, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            assert (
                f"in use by process 1 on '{socket.gethostname()}'"
                in refused.stderr.splitlines()[-1]
            )
        owner.kill()
        owner.stdout.read()  # until nobody in there has it any more
    for elsewhere in ([], CONTAINED):
        contender = [*elsewhere, sys.executable, "-c", OWNER, str(tmp_path)]
        taken = subprocess.run(contender, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert taken.returncode == 0 and int(taken.stdout.splitlines()[0]) > 0, taken.stderr


def test_a_killed_owners_folder_is_free_at_once(tmp_path: Path) -> None:
    source = f"""
import time
from pathlib import Path
from rollout.base.ownership import owned
with owned(Path({str(tmp_path)!r})):
    print(1, flush=True)
    time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"1\n"
    with pytest.raises(FolderError, match=rf"in use by process {owner.pid} on "), owned(tmp_path):
        pass
    owner.kill()
    owner.wait()
    with owned(tmp_path):
        pass


OWNER = """
import sys
import time
from pathlib import Path
from rollout.base.files import write_text
from rollout.base.ownership import FolderError, epoch_of, owned
folder = Path(sys.argv[1])
with owned(folder):
    write_text(folder / "first", "of the first owner")
    print(epoch_of(folder), flush=True)
    sys.stdin.readline()
    try:
        write_text(folder / "first", "late")
    except FolderError as error:
        print(error, flush=True)
"""


def test_an_owner_that_has_lost_its_folder_writes_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        first = int(owner.stdout.readline())
        (
            tmp_path / "lock.json"
        ).unlink()  # by hand; a file system that a host is cut off from does as much
        with owned(tmp_path):
            second = epoch_of(tmp_path / "any" / "file")
            assert second > first
            said, _ = owner.communicate("go on\n", timeout=60)
            by = f"process {os.getpid()} on '{socket.gethostname()}'"
            assert said.startswith(f"{tmp_path}: taken over by {by} since 20")
            assert said.endswith(f"; this process, of epoch {first}, writes no more\n")
            write_text(tmp_path / "second", "of the second owner")
            assert json.loads((tmp_path / "lock.json").read_text())["epoch"] == second
    assert (tmp_path / "first").read_text() == "of the first owner"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "lock.json", "second"]
    assert json.loads((tmp_path / "lock.json").read_text()) == {"epoch": second}
    with owned(tmp_path):
        assert epoch_of(tmp_path) > second
    assert epoch_of(tmp_path) == 0


RACES, CONTENDERS = 1000, 3


def contend(folder: Path, start: Any, end: Any, winners: Any) -> None:
    """Try to own a folder a race; count the races that were won."""
    for race in range(RACES):
        start.wait(60)
        with contextlib.suppress(FolderError), owned(folder / f"{race % 10}"):
            with winners.get_lock():
                winners[race] += 1
            end.wait(60)
            continue
        end.wait(60)


def test_of_three_contenders_for_a_dead_owners_folder_one_wins_every_time(tmp_path: Path) -> None:
    for name in range(10):
        (tmp_path / f"{name}").mkdir()
        (lock := tmp_path / f"{name}" / "lock.json").write_text(
            '{"host": "gone", "pid": 1, "since": ""}'
        )
        os.utime(lock, (1, 1))  # long without a sign of life
    context = multiprocessing.get_context(
        "forkserver"
    )  # a fork of tests may have a lock that a thread of theirs held
    start, end = context.Barrier(CONTENDERS), context.Barrier(CONTENDERS)
    winners = context.Array("i", RACES)
    arguments = (tmp_path, start, end, winners)
    contenders = [context.Process(target=contend, args=arguments) for _ in range(CONTENDERS)]
    for contender in contenders:
        contender.start()
    for contender in contenders:
        contender.join()
    assert set(winners) == {1}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/results: cannot write here \(Not a directory\)"):
        writable(tmp_path / "file" / "results")


def test_a_new_folder_is_this_users_alone_and_one_that_is_there_stays_as_it_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    assert [writable(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "shared")] == [
        0o700,
        0o755,
    ]


def test_an_owner_shows_signs_of_life_and_one_without_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock.json"
    monkeypatch.setattr(ownership, "BEAT_S", 0.01)
    with owned(tmp_path):
        os.utime(lock, (1, 1))
        while lock.stat().st_mtime == 1:
            time.sleep(0.01)
    monkeypatch.setattr(ownership, "BEAT_S", 20.0)
    with owned(tmp_path):
        then = time.time() - 600
        os.utime(lock, (then, then))  # as if it had been stopped
        with pytest.raises(
            FolderError,
            match=r"in use by process .*, which shows no sign of life for 60[0-9] s; stop",
        ):
            owned(tmp_path).__enter__()
        assert json.loads(lock.read_text())["epoch"] == epoch_of(
            tmp_path
        )  # not taken over: it is alive


@pytest.mark.parametrize(
    ("host", "beats", "age_s"),
    [("far", True, 0), ("far", False, 0), ("far", False, 600), ("", 0, 0)],
)
def test_an_owner_on_another_host_keeps_its_folder_though_this_host_could_lock_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, beats: bool, age_s: float
) -> None:
    """As NFS with `local_lock` has it: flock is granted on each host. One that shows no sign of life is replaced."""
    monkeypatch.setattr(ownership, "BEAT_S", 1.0)
    lock, ended = tmp_path / "lock.json", threading.Event()
    lock.write_text(
        json.dumps({"host": host or socket.gethostname(), "pid": 7, "since": "2026", "epoch": 5})
    )
    os.utime(lock, (time.time() - age_s,) * 2)

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(lock)

    owner = threading.Thread(target=beat)
    began = time.monotonic()
    if beats:
        owner.start()
        with pytest.raises(FolderError) as refused:
            owned(tmp_path).__enter__()
        ended.set()
        owner.join()
        by = "process 7 on 'far' since 2026, whom no lock keeps others from"
        assert str(refused.value) == f"{tmp_path}: in use by {by}; stop it first"
        assert json.loads(lock.read_text())["epoch"] == 5
    with owned(tmp_path):
        assert epoch_of(tmp_path) > 5
    waited = time.monotonic() - began
    assert waited >= 1.5 if host and not age_s else waited < 1.4


def test_a_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file", "text")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_text() == "text"


def test_an_owner_removes_what_a_killed_one_was_writing_and_nothing_of_a_folder_with_its_own_owner(
    tmp_path: Path,
) -> None:
    inner, left, live = (
        tmp_path / "train",
        tmp_path / "tasks" / ".a.partial",
        tmp_path / "train" / "x" / ".b.partial",
    )
    for path in (left, live):
        path.parent.mkdir(parents=True)
    with owned(inner):
        left.touch()
        live.touch()
        with owned(tmp_path):
            assert (left.exists(), live.exists()) == (False, True)
    with owned(inner):
        assert not live.exists()


WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
from rollout.base.files import write_text
from rollout.base.ownership import owned
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder = Path(sys.argv[1])
for work in (lambda: owned(folder).__enter__(), lambda: write_text(folder / "file", "text")):
    try:
        work()
    except Exception as error:
        print(error)
"""


def test_what_cannot_be_written_for_want_of_room_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        f"{tmp_path}/lock.json: cannot be written (File too large); make room, and run it again",
        f"[Errno 27] File too large: '{tmp_path}/file'",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.json"]
