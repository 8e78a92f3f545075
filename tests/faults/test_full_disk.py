"""While a disk is full a run waits, says so, and goes on when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_mas.training.full_disk import ROOM_S, until_room
from tests.support.virtual_time import run_virtually

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("unshare", "--user", "--map-root-user", "--mount")


def test_it_waits_half_an_hour_and_no_longer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tries: list[float] = []

    async def write() -> None:
        tries.append(asyncio.get_running_loop().time())
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(OSError, match="quota"):
        run_virtually(until_room(write, tmp_path / "not there" / "file"))
    assert tries[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert ROOM_S - 60 < tries[-1] <= ROOM_S == 1800
    said = capfd.readouterr().err
    free = r"the disk or a quota is full \(\d+ MiB are free\); make room: it is tried again for 30 minutes"
    assert re.fullmatch(rf"{tmp_path}/not there/file: {free}, and nothing is lost\n", said)


def test_what_is_no_full_disk_is_not_waited_for(tmp_path: Path) -> None:
    async def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_virtually(until_room(write, tmp_path / "file"))


@pytest.mark.slow
def test_a_training_whose_disk_is_full_for_some_seconds_comes_to_the_same_bits(tmp_path: Path) -> None:
    probe = [*ALONE, "mount", "-t", "tmpfs", "probe", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own (unshare --user --mount)")
    (tmp_path / "disk").mkdir()
    command = [*ALONE, sys.executable, "-m", "tests.faults.full", str(tmp_path / "disk")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"/checkpoints/\.step_000001.*: the disk or a quota is full \(0 MiB are free\)", done.stdout)
    assert re.search(r"/trajectories/step_000001\.parquet: the disk or a quota is full", done.stdout)
