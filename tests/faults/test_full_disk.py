"""While a disk is full a run waits, says so, and goes on when there is room."""

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
ALONE = ("unshare", "--user", "--map-root-user", "--mount")


def test_it_waits_half_an_hour_and_no_longer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tries: list[float] = []

    async def write() -> None:
        tries.append(asyncio.get_running_loop().time())
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(OSError, match="quota"):
        run_virtually(retry_while_full(write, tmp_path / "not there" / "file"))
    assert tries[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert PATIENCE_S - 60 < tries[-1] <= PATIENCE_S == 1800
    said = capfd.readouterr().err
    free = r"the disk or a quota is full \(\d+ MiB are free\); make room: it is tried again for 30 minutes"
    assert re.fullmatch(rf"{tmp_path}/not there/file: {free}, and nothing is lost\n", said)


def test_what_is_no_full_disk_is_not_waited_for(tmp_path: Path) -> None:
    async def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_virtually(retry_while_full(write, tmp_path / "file"))


def told(folder: Path, gone: Callable[[], None] = lambda: None) -> None:
    """A run's lines and warnings go to stderr; `gone`: what happens to it on the way."""
    tries: list[int] = []

    async def write() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 7

    with ProgressReporter("run train", 3) as reporter:
        metrics, log = (
            MetricsLog(folder / "metrics", 0, reporter.note),
            CollectionLog(folder / "calls"),
        )
        reporter.step(1, {"reward": 0.5})
        gone()
        reporter.note("n" * 99_999)  # more than waits in memory
        for name in ("metrics", "calls"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("/dev/full")
        metrics.append(1, {"x": 1.0})
        log.add_call("key", 1)
        assert run_virtually(retry_while_full(write, folder / "file")) == 7
        reporter.step(3, {"reward": 0.5})


@contextmanager
def closed(stream: TextIO) -> Iterator[TextIO]:
    """Closed in the end, whatever it says then."""
    try:
        yield stream
    finally:
        with suppress(OSError):
            stream.close()


def test_a_log_on_the_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed(Path("/dev/full").open("w")) as log:
        monkeypatch.setattr(sys, "stderr", log)
        told(tmp_path)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            print("n" * 99_999, file=log, flush=True)


@pytest.mark.parametrize("bar", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bool
) -> None:
    """A bar is drawn there, or lines go there while all goes into a log."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with closed(os.fdopen(slave, "w")) as stream:
        monkeypatch.setattr(*((sys, "stderr") if bar else (user_terminal, "_terminal")), stream)
        told(tmp_path, lambda: os.close(master))
        monkeypatch.undo()
        with pytest.raises(OSError, match="Input/output error"):
            os.write(slave, b"x")


@pytest.mark.slow
def test_a_training_whose_disk_is_full_for_some_seconds_comes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    probe = [*ALONE, "mount", "-t", "tmpfs", "probe", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode:
        pytest.skip(
            "this machine lets nobody mount a file system of his own (unshare --user --mount)"
        )
    (tmp_path / "disk").mkdir()
    command = [*ALONE, sys.executable, "-m", "tests.faults.full", str(tmp_path / "disk")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"/checkpoints/\.step_000001.*: the disk or a quota is full \(0 MiB are free\)", done.stdout
    )
    assert re.search(
        r"/trajectories/step_000001\.parquet: the disk or a quota is full", done.stdout
    )
