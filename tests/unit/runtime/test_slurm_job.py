"""A stage in a job of Slurm, whose commands are stand-ins here: queued again or ended, and a Ray over its machines."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_mas.runtime import slurm
from mcore_mas.runtime.slurm import queued_again
from mcore_mas.runtime.stop_signal import STOP_SIGNALS, Stopped

Stand = Callable[[str, str], None]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """Puts a shell script in the place of a command."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield put
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(
    ("squeue", "saves", "queued"),
    [
        (
            "2:03 57:57 RUNNING None",
            False,
            True,
        ),  # while models are loaded, or before the end of the first step
        ("1-02:00:00 UNLIMITED RUNNING None", False, True),
        ("0:30 9:30 RUNNING None", False, True),  # of ten minutes, by a preemption
        (
            "0:01 4:59 RUNNING None",
            False,
            False,
        ),  # of five: its limit's signal comes at its start, each time
        ("2:10 5:50 RUNNING None", False, False),
        ("55:03 4:57 RUNNING None", False, False),
        ("1-00:00:00 23:59:59 RUNNING None", False, False),
        ("2:00:10 INVALID RUNNING None", False, False),  # Slurm lets some jobs exceed their limit
        ("55:03 4:57 RUNNING None", True, True),
        ("2:03 57:57 COMPLETING None", True, False),  # by `scancel`
        ("2:03 57:57 COMPLETING None", False, False),
    ],
)
def test_a_job_is_queued_again_if_something_was_saved_or_most_of_its_time_is_left(
    squeue: str,
    saves: bool,
    queued: bool,
    stand: Stand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand("squeue", f'[ "$*" = "--noheader --jobs 12 --format %M %L %T %r" ] && echo {squeue}')
    stand("scontrol", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(slurm, "_PATIENCE_S", 0.01)
    (tmp_path / "step_000001").mkdir()  # of before this start
    with pytest.raises(Stopped) as caught, queued_again(tmp_path):
        assert set(STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if saves:
            (tmp_path / "step_000002").mkdir()
        raise Stopped("stopped by SIGURG")
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 12\n" if queued else "")
    ended = queued or "COMPLETING" in squeue
    told = "" if ended else "; not queued again, as this job's time (runtime) did not suffice"
    assert str(caught.value) == f"stopped by SIGURG{told}"


def test_after_ctrl_c_the_job_around_is_left_alone(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "scontrol"):
        stand(name, f"echo {name} >> {tmp_path}/asked; echo 2:03 57:57 RUNNING None")
    monkeypatch.setenv(
        "SLURM_JOB_ID", "12"
    )  # of an editor's or a notebook's job, in whose terminal the pipeline runs
    with pytest.raises(Stopped, match=r"^stopped by SIGINT after step 3$"), queued_again(tmp_path):
        (tmp_path / "step_000002").mkdir()
        raise Stopped("stopped by SIGINT after step 3")
    assert not (tmp_path / "asked").exists()


def test_in_a_container_without_slurm_a_stop_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with (
            pytest.raises(Stopped, match=r"^stopped by SIGURG; not queued again, as Slurm's "),
            queued_again(tmp_path),
        ):
            raise Stopped("stopped by SIGURG")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_job_that_slurm_does_not_queue_again_says_why(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand("squeue", "echo 2:03 57:57 RUNNING None")
    stand("scontrol", "echo 'Access/permission denied for job 12' >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(Stopped) as caught, queued_again(tmp_path):
        raise Stopped("stopped by SIGURG")
    assert (
        str(caught.value)
        == "stopped by SIGURG; Slurm does not queue it again: Access/permission denied for job 12"
    )


OVER_TWO = """
import sys
from pathlib import Path
from mcore_mas.runtime.slurm import ray_over
with ray_over(2, 1, Path(sys.argv[1])) as address:
    import ray
    ray.init(address=address, log_to_driver=False)
    print(ray.cluster_resources()["CPU"], sum(node["Alive"] for node in ray.nodes()))
    ray.shutdown()
"""


def over_two(home: Path) -> subprocess.CompletedProcess[str]:
    """A Ray over two machines, for somebody who has never used one."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    with tempfile.TemporaryDirectory(
        dir="/tmp", prefix="r"
    ) as folder:  # a short path: Ray has sockets in it
        env = {**unset, "HOME": str(home), "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", OVER_TWO, str(home / "ray.log")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_ray_over_machines_makes_the_token_that_lets_them_join(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = (
        'while [ "$1" != -m ]; do last=$1; shift; done; exec "$last" "$@"'  # this machine once more
    )
    stand(
        "srun", f'case "${{SLURM_CPU_BIND+$*}}" in *--cpu-bind=none*) ;; *) exit 1; esac; {again}'
    )
    monkeypatch.setenv(
        "SLURM_CPU_BIND", "quiet,mask_cpu:0x2"
    )  # as Slurm's task/affinity sets it: real srun obeys it
    done = over_two(tmp_path)
    assert done.stdout.split() == ["2.0", "2"], done.stderr + (tmp_path / "ray.log").read_text()
    token = tmp_path / ".ray" / "auth_token"
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert token.read_text() not in (tmp_path / "ray.log").read_text()


@pytest.mark.parametrize(
    ("shown", "route", "found"),
    [
        (
            "NodeName=n0 NodeAddr=10.0.0.1 Port=1\\nNodeName=n1 NodeAddr=10.0.0.2 Port=1",
            "10.0.0.1",
            "10.0.0.1",
        ),
        (
            "NodeName=n0 NodeAddr=localhost Port=1\\nNodeName=n1 NodeAddr=10.0.0.2 Port=1",
            "127.0.0.1",
            None,
        ),
        ("Node n0 not found", "10.0.0.1", None),
    ],
)
def test_machines_of_a_job_meet_in_the_network_of_their_addresses_in_slurm(
    shown: str, route: str, found: str | None, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand("scontrol", f'[ "$*" = "--oneliner show node n[0-1]" ] && printf "{shown}\\n"')
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    asked: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, place: asked.append(place))
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (route, 4))
    assert slurm._address_here() == found
    assert asked == ([] if "not found" in shown else [("10.0.0.2", 9)])


RACE = """
import multiprocessing, os, sys
from pathlib import Path
from mcore_mas.runtime import local_ray

ROUNDS, JOBS = 200, 4

def job(barrier, said):
    own = os.getpid
    for number in range(ROUNDS):
        os.environ["HOME"] = f"{sys.argv[1]}/{number}"
        barrier.wait(60)
        os.getpid = lambda: 7  # as those of several machines that share a home can be
        local_ray.make_private_token()
        os.getpid = own
        said.put((number, (Path.home() / ".ray/auth_token").read_text()))

for number in range(ROUNDS):
    Path(sys.argv[1], str(number)).mkdir()
fork = multiprocessing.get_context("fork")
barrier, said = fork.Barrier(JOBS), fork.Queue()
jobs = [fork.Process(target=job, args=(barrier, said)) for _ in range(JOBS)]
for process in jobs:
    process.start()
seen = [said.get(timeout=60) for _ in range(ROUNDS * JOBS)]
for process in jobs:
    process.join()
print([process.exitcode for process in jobs], len(set(seen)), {len(token) for _, token in seen})
"""


def test_jobs_that_start_at_once_in_one_home_agree_on_its_token(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "[0, 0, 0, 0] 200 {64}\n", done.stderr[
        -2000:
    ]  # one for each home, never half of one
    assert {path.name for path in tmp_path.glob("*/.ray/*")} == {"auth_token"}


@pytest.mark.slow
def test_machines_that_cannot_join_are_told_at_once(stand: Stand, tmp_path: Path) -> None:
    stand("srun", "exit 1")
    began = time.monotonic()
    said = over_two(tmp_path).stderr.splitlines()[-1]
    assert re.fullmatch(
        r"mcore_mas\.runtime\.errors\.TrainingError: [01] of 2 machines joined Ray at [\d.:]+, and what starts them "
        rf"has ended; see {tmp_path}/ray\.log",
        said,
    )
    assert time.monotonic() - began < 120
