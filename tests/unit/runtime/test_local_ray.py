"""A Ray of a run's own: what its processes inherit, its token, and what a failed or killed start leaves."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_mas.runtime.local_ray import KEEP_PAGES

_SCRIPT = """
import json, os, resource
import numpy as np, ray
from mcore_mas.runtime.local_ray import KEEP_PAGES, running_ray

@ray.remote
def worker():
    for _ in range(3):  # 64 MiB, or 16,384 pages, each time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(8 << 20)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {name: os.environ.get(name) for name in KEEP_PAGES} | {"faults": faults}

with running_ray(1, 100, keep_pages=True):
    print(json.dumps(ray.get(worker.remote())))
"""

_FAILS = """
import os, sys
from pathlib import Path
from unittest import mock
import psutil, ray
from ray._private import services
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.local_ray import running_ray

found, tries = services.get_node, []

def get_node(*arguments, **options):
    tries.append(None)
    if len(tries) <= int(sys.argv[1]):
        raise ValueError("The current node timed out during startup.")
    return found(*arguments, **options)

def sessions():
    return list(Path(os.environ["RAY_TMPDIR"]).glob(f"ray-*/ray/session_*_{os.getpid()}"))

def command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""

try:
    with mock.patch.object(services, "get_node", get_node), running_ray(1, 100):
        (own,) = sessions()
        assert Path(ray._private.worker._global_node.get_session_dir_path()).resolve() == own.resolve()
        commands = [command(process) for process in psutil.Process().children(recursive=True)]
        assert sum("gcs_server" in command for command in commands) == 1, commands
    print("well")
except ClusterError as error:
    print(error)
print(len(tries), sessions())
"""

_OPENED = """
import json, os, subprocess, sys
from pathlib import Path
import psutil, ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from mcore_mas.runtime.local_ray import running_ray

with running_ray(1, 100):
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    mode = ray.get(ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote())
    children = psutil.Process().children(recursive=True)
    doors = {c.name().partition(":")[0] for c in children for d in c.net_connections() if d.status == "LISTEN"}
    [raylet] = [child for child in children if child.name() == "raylet"]
    patience = raylet.environ()["RAY_worker_register_timeout_seconds"]
    modes = [oct(path.stat().st_mode & 0o777) for path in (session.parents[1], Path.home() / ".ray/auth_token")]
    joining = [sys.executable, "-c", f"import ray; ray.init(address='{ray.get_runtime_context().gcs_address}')"]
    stranger = os.environ | {"RAY_AUTH_MODE": "disabled"}
    said = subprocess.run(joining, env=stranger, capture_output=True, text=True).stderr.splitlines()[-1]
    found = get_authentication_mode() == AuthenticationMode.TOKEN
    print(json.dumps([found, mode, *modes, sorted(doors), patience, said]))
"""


@pytest.mark.slow
def test_a_ray_of_a_runs_own_asks_for_a_token_whatever_the_environment_says() -> None:
    """Ray listens at all addresses of the machine: `RAY_AUTH_MODE=disabled` would let everybody in."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "HOME": folder,
            "RAY_AUTH_MODE": "disabled",
        }
        command = [sys.executable, "-c", _OPENED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *found, doors, patience, said = json.loads(done.stdout.splitlines()[-1])
    assert found == [True, "token", "0o700", "0o600"]
    assert doors == ["gcs_server", "ray", "raylet"]  # no dashboard
    assert (
        patience == "300"
    )  # seconds that a busy machine may take to start a worker; by default 60
    assert said.startswith("ConnectionError: Failed to connect to Ray cluster")


SLOW = "no Ray starts on this machine in three tries of 30 s; end other work on it, and start this again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "said"), [(1, ["well", "2 []"]), (3, [f"cluster.address: local: {SLOW}", "3 []"])]
)
def test_a_ray_that_did_not_start_in_time_leaves_neither_folder_nor_process(
    failing: int, said: list[str]
) -> None:
    with tempfile.TemporaryDirectory(
        dir="/tmp", prefix="r"
    ) as folder:  # a short path: Ray has sockets in it
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", _FAILS, str(failing)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == said, done.stdout + done.stderr


_STOPPED = """
import os, signal, sys
from pathlib import Path
from unittest import mock
import psutil, ray
from ray._private import services
from mcore_mas.runtime.local_ray import running_ray
from mcore_mas.runtime.stop_signal import Stopped, stop_at_start

get_node = services.get_node

def get_node_when_stopped(*arguments, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    return get_node(*arguments, **options)

stop_at_start()
try:
    with mock.patch.object(services, "get_node", get_node_when_stopped), running_ray(1, 100):
        print("Ray runs")
except Stopped as stop:
    print(stop)
print(list(Path(os.environ["RAY_TMPDIR"]).glob("ray-*/ray/session_*_*")))
_, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=30)
print(alive)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_stops_the_run_and_leaves_neither_folder_nor_process(
    number: signal.Signals,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", _STOPPED, str(int(number))]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    stopped = f"stopped by {number.name}; the same command continues from what is saved"
    assert result.stdout.splitlines() == [stopped, "[]", "[]"], result.stderr


@pytest.mark.slow
def test_workers_keep_the_memory_that_they_free_unless_the_environment_says_otherwise() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
    environment = inherited | {"MALLOC_TOP_PAD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("faults") < 100  # the same pages again
    assert seen == KEEP_PAGES | {"MALLOC_TOP_PAD_": "1048576"}


_TOKEN_RACE = """
import multiprocessing, os, sys
from pathlib import Path
from mcore_mas.runtime import local_ray

HOMES, JOBS = 200, 4

def make_tokens(barrier, tokens):
    getpid = os.getpid
    for number in range(HOMES):
        os.environ["HOME"] = f"{sys.argv[1]}/{number}"
        barrier.wait(60)
        # jobs on machines that share a home can have the same process id
        os.getpid = lambda: 7
        local_ray.make_private_token()
        os.getpid = getpid
        tokens.put((number, (Path.home() / ".ray/auth_token").read_text()))

for number in range(HOMES):
    Path(sys.argv[1], str(number)).mkdir()
fork = multiprocessing.get_context("fork")
barrier, tokens = fork.Barrier(JOBS), fork.Queue()
jobs = [fork.Process(target=make_tokens, args=(barrier, tokens)) for _ in range(JOBS)]
for job in jobs:
    job.start()
seen = [tokens.get(timeout=60) for _ in range(HOMES * JOBS)]
for job in jobs:
    job.join()
print([job.exitcode for job in jobs], len(set(seen)), {len(token) for _, token in seen})
"""


def test_jobs_that_start_at_once_in_one_home_agree_on_its_token(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TOKEN_RACE, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # one whole token for each of the 200 homes
    assert finished.stdout == "[0, 0, 0, 0] 200 {64}\n", finished.stderr[-2000:]
    assert {path.name for path in tmp_path.glob("*/.ray/*")} == {"auth_token"}
