"""Requeue of a Slurm job that is told to stop, with scripts in place of Slurm's commands."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_mas.runtime import slurm
from mcore_mas.runtime.slurm import largest_node_mb, requeue_when_stopped
from mcore_mas.runtime.stop_signal import STOP_SIGNALS, Stopped
from tests.support.fake_commands import FakeCommands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    return FakeCommands(tmp_path / "bin", monkeypatch)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be in job 12, and restore its blocked signals afterwards."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(slurm, "_WAIT_FOR_END_S", 0.01)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize(
    ("squeue", "saves", "requeued"),
    [
        # while models are loaded, or before the end of the first step
        ("2:03 57:57 RUNNING None", False, True),
        ("1-02:00:00 UNLIMITED RUNNING None", False, True),
        # a preemption in a job of ten minutes
        ("0:30 9:30 RUNNING None", False, True),
        # a job of five minutes, which is always warned when it starts
        ("0:01 4:59 RUNNING None", False, False),
        ("2:10 5:50 RUNNING None", False, False),
        ("55:03 4:57 RUNNING None", False, False),
        ("1-00:00:00 23:59:59 RUNNING None", False, False),
        # a job that Slurm lets exceed its limit
        ("2:00:10 INVALID RUNNING None", False, False),
        ("55:03 4:57 RUNNING None", True, True),
        # scancel
        ("2:03 57:57 COMPLETING None", True, False),
        ("2:03 57:57 COMPLETING None", False, False),
    ],
)
def test_a_job_is_requeued_if_it_has_saved_something_or_has_most_of_its_time_left(
    squeue: str, saves: bool, requeued: bool, commands: FakeCommands, tmp_path: Path
) -> None:
    expected_arguments = "--noheader --jobs 12 --format %M %L %T %r"
    commands.add("squeue", f'[ "$*" = "{expected_arguments}" ] && echo {squeue}')
    commands.add("scontrol", f'echo "$@" >> {tmp_path}/scontrol.log')
    (tmp_path / "step_000001").mkdir()  # saved by an earlier start
    with pytest.raises(Stopped) as stopped, requeue_when_stopped(tmp_path):
        assert set(STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if saves:
            (tmp_path / "step_000002").mkdir()
        raise Stopped("stopped by SIGURG")

    log = tmp_path / "scontrol.log"
    requests = log.read_text() if log.exists() else ""
    assert requests == ("requeue 12\n" if requeued else "")
    reason = ""
    if not requeued and "COMPLETING" not in squeue:
        reason = "; not queued again, as this job's time (runtime) did not suffice"
    assert str(stopped.value) == f"stopped by SIGURG{reason}"


def test_after_ctrl_c_slurm_is_not_asked(commands: FakeCommands, tmp_path: Path) -> None:
    """The pipeline runs in the terminal of a job with other work, such as an editor's."""
    for name in ("squeue", "scontrol"):
        commands.add(name, f"echo {name} >> {tmp_path}/log; echo 2:03 57:57 RUNNING None")
    message = r"^stopped by SIGINT after step 3$"
    with pytest.raises(Stopped, match=message), requeue_when_stopped(tmp_path):
        (tmp_path / "step_000002").mkdir()
        raise Stopped("stopped by SIGINT after step 3")
    assert not (tmp_path / "log").exists()


def test_without_slurms_commands_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has the environment of a job without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"^stopped by SIGURG; not queued again, as Slurm's "
    with pytest.raises(Stopped, match=message), requeue_when_stopped(tmp_path):
        raise Stopped("stopped by SIGURG")


def test_a_refusal_of_slurm_is_reported(commands: FakeCommands, tmp_path: Path) -> None:
    commands.add("squeue", "echo 2:03 57:57 RUNNING None")
    commands.add("scontrol", "echo 'Access/permission denied for job 12' >&2; exit 1")
    with pytest.raises(Stopped) as stopped, requeue_when_stopped(tmp_path):
        raise Stopped("stopped by SIGURG")
    assert str(stopped.value) == (
        "stopped by SIGURG; Slurm does not queue it again: Access/permission denied for job 12"
    )


@pytest.mark.parametrize(
    ("answer", "largest"),
    [("515000\n1031000\n515000", 1_031_000), ("64000+", 64_000), ("1\n1", None), ("", None)],
)
def test_the_largest_machine_of_a_partition(
    answer: str, largest: int | None, commands: FakeCommands
) -> None:
    commands.add("sinfo", f"printf '{answer}'")
    assert largest_node_mb() == largest
    assert largest_node_mb("gpu") == largest
