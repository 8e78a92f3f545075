"""Failpoints execute their orders; kills and a full disk at write boundaries lose no data."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.base.failpoints import FAILPOINTS, failpoint
from rollout.base.files import write_text

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).resolve().parents[2]


def test_a_failpoint_does_nothing_until_it_is_ordered_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failpoint("a.place")
    monkeypatch.setenv(FAILPOINTS, f"a.*=list:{tmp_path / 'passed'};a.place=full@2")
    failpoint("a.place")
    failpoint("b.place")
    with pytest.raises(OSError, match=r"No space left on device: 'a.place'") as raised:
        failpoint("a.place")
    assert raised.value.errno == errno.ENOSPC
    failpoint("a.place")  # the order was for the second pass only
    assert (tmp_path / "passed").read_text().splitlines() == ["a.place"] * 3
    monkeypatch.setenv(FAILPOINTS, "a.place=explode")
    with pytest.raises(
        ValueError, match="unknown action 'explode'; known: kill, stop, full, sleep, list"
    ):
        failpoint("a.place")


@pytest.mark.parametrize(
    ("action", "expected_signal"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)]
)
def test_a_failpoint_kills_or_stops_its_process(action: str, expected_signal: int) -> None:
    code = "from rollout.base.failpoints import failpoint\nfailpoint('first')\nfailpoint('second')"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, FAILPOINTS: f"second={action}"}
    )
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    child.returncode = -expected_signal  # Popen need not wait for the process any more
    if os.WIFSTOPPED(status):
        actual_signal = os.WSTOPSIG(status)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    else:
        actual_signal = os.WTERMSIG(status)
    assert actual_signal == expected_signal


def test_a_full_disk_leaves_a_file_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_text(tmp_path / "file", "before")
    for boundary in ("begun", "written"):
        monkeypatch.setenv(FAILPOINTS, f"file.{boundary}:file=full")
        with pytest.raises(OSError, match="No space left"):
            write_text(tmp_path / "file", "after")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == "before"


@pytest.mark.slow
def test_a_pipeline_killed_in_every_kind_of_write_gives_the_same_bits() -> None:
    command = [sys.executable, "-m", "tests.faults.kills", "sample"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    faults = [line for line in result.stdout.splitlines() if ": the same " in line]
    assert len(faults) >= 18
    slow_disks = [line for line in faults if line.startswith("50 ms more for each of ")]
    assert len(slow_disks) == 2  # in the preparation and in the pipeline
    for kind in (
        "chunks.written:rank",
        "file.written:manifest.json",
        "metrics.written",
        "file.written:done.json",
    ):
        assert any(line.startswith("killed") and kind in line for line in faults), kind
    for kind in (
        "chunks.begun:rank",
        "checkpoint.begun",
        "metrics.begun",
        "file.begun:step",
    ):
        assert any(line.startswith("disk full") and kind in line for line in faults), kind
