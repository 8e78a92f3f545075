"""A folder has one owner as long as that process lives, and each owner has a later epoch."""

import contextlib
import fcntl
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

from rollout.base import ownership
from rollout.base.ownership import FolderError, epoch_of, is_owned, owned

OWNER = """
import sys
from pathlib import Path
from rollout.base.ownership import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    sys.stdin.readline()
"""
# In this PID namespace, process ids start at 1; the host name is the same.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child"]


def start_owner(folder: Path, *wrapper: str) -> subprocess.Popen[str]:
    """Start a process that owns the folder until its standard input ends."""
    command = [*wrapper, sys.executable, "-c", OWNER, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_asking_for_an_owner_disturbs_nobody_who_becomes_one(tmp_path: Path) -> None:
    assert not is_owned(tmp_path)
    with owned(tmp_path):
        assert is_owned(tmp_path)
    assert not is_owned(tmp_path)

    asking = (tmp_path / "lock.json").open("rb")
    fcntl.flock(asking, fcntl.LOCK_SH)  # as `is_owned` does for a moment
    threading.Timer(0.03, asking.close).start()
    with owned(tmp_path):
        assert asking.closed


def test_a_living_owner_keeps_its_folder(tmp_path: Path) -> None:
    expected = f"in use by process {os.getpid()} on '{socket.gethostname()}' since 20"
    with owned(tmp_path), pytest.raises(FolderError, match=expected), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass


@pytest.mark.parametrize(
    "record",
    ["", "null", "[1]", '{"pid": 1}', '{"host": "els', "[" * 9000, "\udcff", '{"epoch": "y"}'],
)
def test_a_damaged_lock_record_does_not_change_who_owns_the_folder(
    tmp_path: Path, record: str
) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(record, errors="surrogateescape")
    with owned(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        lock.write_text(record, errors="surrogateescape")
        expected = r"in use by another process; stop it first$"
        with pytest.raises(FolderError, match=expected), owned(tmp_path):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a namespace")
def test_an_owner_in_a_container_with_the_same_host_name_keeps_the_folder_until_it_ends(
    tmp_path: Path,
) -> None:
    """The owner in the container has process id 1; on the host, a process with this id always exists."""
    with start_owner(tmp_path, *CONTAINER) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == 1
        for wrapper in ([], CONTAINER):
            _, errors = start_owner(tmp_path, *wrapper).communicate(timeout=60)
            message = errors.splitlines()[-1]
            assert f"in use by process 1 on '{socket.gethostname()}'" in message
        owner.kill()
        owner.stdout.read()  # wait until no process in the container holds the lock
    for wrapper in ([], CONTAINER):
        output, errors = start_owner(tmp_path, *wrapper).communicate(timeout=60)
        assert output == "owned\n", errors


def test_the_folder_of_a_killed_owner_is_free_at_once(tmp_path: Path) -> None:
    with start_owner(tmp_path) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        expected = rf"in use by process {owner.pid} on "
        with pytest.raises(FolderError, match=expected), owned(tmp_path):
            pass
        owner.kill()
    with owned(tmp_path):
        pass


def test_each_owner_has_a_later_epoch(tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    with owned(tmp_path):
        first_epoch = epoch_of(tmp_path / "any" / "file")
        assert json.loads(lock.read_text())["epoch"] == first_epoch
    assert epoch_of(tmp_path) == 0
    with owned(tmp_path):
        second_epoch = epoch_of(tmp_path)
    # A host whose clock is ahead has written this epoch.
    future_epoch = second_epoch + 10**9
    lock.write_text(json.dumps({"epoch": future_epoch}))
    with owned(tmp_path):
        third_epoch = epoch_of(tmp_path)
    lock.unlink()
    time.sleep(0.002)  # without a record, the epoch is the time in milliseconds
    with owned(tmp_path):
        fourth_epoch = epoch_of(tmp_path)
    assert first_epoch < second_epoch
    assert third_epoch == future_epoch + 1
    assert second_epoch < fourth_epoch


RACES = 1000
CONTENDERS = 3


def contend(folder: Path, start: Any, end: Any, winners: Any) -> None:
    """Try to own a folder in each race, and add 1 to the winners of each race won."""
    # No process asks who owns the folder, so a loser gives up at once: it would wait 0.1 s in each race.
    ownership._ASKING_S = 0.0
    for race in range(RACES):
        start.wait(60)
        with contextlib.suppress(FolderError), owned(folder / f"{race % 10}"):
            with winners.get_lock():
                winners[race] += 1
            end.wait(60)
            continue
        end.wait(60)


def test_exactly_one_of_three_contenders_gets_a_dead_owners_folder(tmp_path: Path) -> None:
    for name in range(10):
        folder = tmp_path / f"{name}"
        folder.mkdir()
        (folder / "lock.json").write_text('{"host": "gone", "pid": 1, "since": ""}')
    # A forked child could inherit a lock that another thread of this process holds.
    context = multiprocessing.get_context("forkserver")
    start = context.Barrier(CONTENDERS)
    end = context.Barrier(CONTENDERS)
    winners = context.Array("i", RACES)
    arguments = (tmp_path, start, end, winners)
    contenders = [context.Process(target=contend, args=arguments) for _ in range(CONTENDERS)]
    for contender in contenders:
        contender.start()
    for contender in contenders:
        contender.join()
    assert set(winners) == {1}


def test_an_owner_removes_partial_files_except_in_a_folder_with_another_owner(
    tmp_path: Path,
) -> None:
    inner = tmp_path / "train"  # has its own owner
    abandoned = tmp_path / "tasks" / ".a.partial"
    in_use = inner / "x" / ".b.partial"
    for path in (abandoned, in_use):
        path.parent.mkdir(parents=True)
    with owned(inner):
        abandoned.touch()
        in_use.touch()
        with owned(tmp_path):
            assert not abandoned.exists()
            assert in_use.exists()
    with owned(inner):
        assert not in_use.exists()
