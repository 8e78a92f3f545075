"""Runs on a full disk: they wait, print a warning, and continue when there is free space again."""

from __future__ import annotations

import asyncio
import errno
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest

from mcore_mas.runtime import user_terminal
from mcore_mas.runtime.full_disk import PATIENCE_S, retry_while_full
from mcore_mas.tracking.metrics_log import MetricsLog
from mcore_mas.tracking.progress import ProgressReporter
from rollout.records.collection_log import CollectionLog
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]
IN_NEW_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def test_a_full_disk_is_waited_for_half_an_hour(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts_s: list[float] = []

    async def write() -> None:
        attempts_s.append(asyncio.get_running_loop().time())
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(OSError, match="quota"):
        run_virtually(retry_while_full(write, tmp_path / "not there" / "file"))
    assert attempts_s[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert PATIENCE_S - 60 < attempts_s[-1] <= PATIENCE_S == 1800
    warning = (
        rf"{tmp_path}/not there/file: the disk or a quota is full \(\d+ MiB are free\); make room; "
        r"the write is repeated for 30 minutes, and nothing is lost\n"
    )
    assert re.fullmatch(warning, capfd.readouterr().err)


def test_the_half_hour_begins_at_the_first_failure(tmp_path: Path) -> None:
    """A large checkpoint may be written for more than half an hour before the disk is full."""
    attempts_s: list[float] = []

    async def write() -> str:
        attempts_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(2000)
        if len(attempts_s) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "written"

    assert run_virtually(retry_while_full(write, tmp_path / "file")) == "written"
    assert attempts_s == [0, 2001]


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    async def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_virtually(retry_while_full(write, tmp_path / "file"))


def report_steps(folder: Path, break_stderr: Callable[[], None] = lambda: None) -> None:
    """Report steps and warnings of a run on stderr while its disk is full.

    Args:
        break_stderr: called after the first step.
    """
    attempts = 0

    async def write() -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 7

    with ProgressReporter("run train", 3) as reporter:
        metrics = MetricsLog(folder / "metrics", 0, reporter.note)
        calls = CollectionLog(folder / "calls")
        reporter.step(1, {"reward": 0.5})
        break_stderr()
        reporter.note("n" * 99_999)  # longer than the stream's buffer
        for name in ("metrics", "calls"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("/dev/full")
        metrics.append(1, {"x": 1.0})
        calls.add_call("key", 1)
        assert run_virtually(retry_while_full(write, folder / "file")) == 7
        reporter.step(3, {"reward": 0.5})


@contextmanager
def closing(stream: TextIO) -> Iterator[TextIO]:
    """Close a stream after this block, ignoring the error if its buffer cannot be written."""
    try:
        yield stream
    finally:
        with suppress(OSError):
            stream.close()


def test_a_log_on_the_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Path("/dev/full").open("w")) as log:
        monkeypatch.setattr(sys, "stderr", log)
        report_steps(tmp_path)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            print("n" * 99_999, file=log, flush=True)


@pytest.mark.parametrize("bar", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bool
) -> None:
    """With `bar`, stderr is the terminal, with a progress bar; else the terminal gets lines beside a log on stderr."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with closing(os.fdopen(slave, "w")) as terminal:
        if bar:
            monkeypatch.setattr(sys, "stderr", terminal)
        else:
            monkeypatch.setattr(user_terminal, "_terminal", terminal)
        report_steps(tmp_path, break_stderr=lambda: os.close(master))
        monkeypatch.undo()
        with pytest.raises(OSError, match="Input/output error"):
            os.write(slave, b"x")


@pytest.mark.slow
def test_a_disk_that_is_full_for_seconds_does_not_change_a_training(tmp_path: Path) -> None:
    probe = [*IN_NEW_NAMESPACE, "mount", "-t", "tmpfs", "probe", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("users of this machine cannot mount file systems (unshare --user --mount)")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*IN_NEW_NAMESPACE, sys.executable, "-m", "tests.faults.full", str(disk)]
    completed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    full = r"the disk or a quota is full"
    assert re.search(rf"/checkpoints/\.step_000001.*: {full} \(0 MiB are free\)", completed.stdout)
    assert re.search(rf"/trajectories/step_000001\.parquet: {full}", completed.stdout)
