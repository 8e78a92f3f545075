"""Failpoints do what they are ordered to, and kills at write boundaries leave nothing behind and lose nothing."""

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
    failpoint("a.place")  # the third time
    assert (tmp_path / "passed").read_text().splitlines() == ["a.place"] * 3
    monkeypatch.setenv(FAILPOINTS, "a.place=explode")
    with pytest.raises(
        ValueError, match="unknown action 'explode'; known: kill, stop, full, sleep, list"
    ):
        failpoint("a.place")


@pytest.mark.parametrize(("action", "ended"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_ended_or_stopped_where_it_is_ordered(action: str, ended: int) -> None:
    code = "from rollout.base.failpoints import failpoint\nfailpoint('first')\nfailpoint('second')"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, FAILPOINTS: f"second={action}"}
    )
    status = os.waitpid(child.pid, os.WUNTRACED)[1]
    child.returncode = -ended  # it has been waited for
    assert (os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WSTOPSIG(status)) == ended
    if os.WIFSTOPPED(status):
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def test_a_full_disk_leaves_a_file_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_text(tmp_path / "file", "before")
    for place in ("begun", "written"):
        monkeypatch.setenv(FAILPOINTS, f"file.{place}:file=full")
        with pytest.raises(OSError, match="No space left"):
            write_text(tmp_path / "file", "after")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == "before"


@pytest.mark.slow
def test_killed_at_a_boundary_of_every_kind_a_pipeline_comes_to_the_same_bits() -> None:
    command = [sys.executable, "-m", "tests.faults.kills", "sample"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert made.returncode == 0, made.stdout + made.stderr
    said = [line for line in made.stdout.splitlines() if ": the same " in line]
    assert len(said) >= 30
    assert (
        len([line for line in said if line.startswith("50 ms more for each of ")]) == 2
    )  # a slow disk, in both parts
    for kind in (
        "chunks.written:rank",
        "file.written:manifest.json",
        "metrics.written",
        "file.written:done.json",
    ):
        assert any(line.startswith("killed") and kind in line for line in said), kind
    for kind in (
        "chunks.begun:rank",
        "checkpoint.begun",
        "metrics.begun",
        "file.begun:step",
        "file.begun:part",
    ):
        assert any(line.startswith("disk full") and kind in line for line in said), kind
