"""The Ray that a run starts: environment of its processes, token, and cleanup after a failed or killed start."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray._private import worker as ray_worker

from mcore_mas.runtime.local_ray import KEEP_PAGES, remove_ray_excepthook
from tests.support import ray_forks
from tests.support.ray_worker import VARIABLE

_COUNT_PAGE_FAULTS = """
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

_START_FAILS = """
import os, sys
from pathlib import Path
from unittest import mock
import psutil, ray
from ray._private import services
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.local_ray import running_ray

failing_starts = int(sys.argv[1])
starts = 0
original_get_node = services.get_node

def get_node(*arguments, **options):
    global starts
    starts += 1
    if starts <= failing_starts:
        raise ValueError("The current node timed out during startup.")
    return original_get_node(*arguments, **options)

def sessions():
    return list(Path(os.environ["RAY_TMPDIR"]).glob(f"ray-*/ray/session_*_{os.getpid()}"))

def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""

try:
    with mock.patch.object(services, "get_node", get_node), running_ray(1, 100):
        (session,) = sessions()
        ray_session = Path(ray._private.worker._global_node.get_session_dir_path())
        assert ray_session.resolve() == session.resolve()
        commands = [command_line(process) for process in psutil.Process().children(recursive=True)]
        assert sum("gcs_server" in command for command in commands) == 1, commands
    print("started")
except ClusterError as error:
    print(error)
print(starts, sessions())
"""

_REPORT_ACCESS = """
import json, os, subprocess, sys
from pathlib import Path
import psutil, ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from mcore_mas.runtime.local_ray import running_ray

with running_ray(1, 100):
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    token = Path.home() / ".ray/auth_token"
    children = psutil.Process().children(recursive=True)
    listeners = set()
    for child in children:
        if any(connection.status == "LISTEN" for connection in child.net_connections()):
            listeners.add(child.name().partition(":")[0])
    [raylet] = [child for child in children if child.name() == "raylet"]

    # A process without the token tries to join.
    address = ray.get_runtime_context().gcs_address
    join = subprocess.run(
        [sys.executable, "-c", f"import ray; ray.init(address='{address}')"],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
    )
    print(json.dumps({
        "driver uses the token": get_authentication_mode() == AuthenticationMode.TOKEN,
        "mode of workers": ray.get(ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote()),
        "permissions of the folder": oct(session.parents[1].stat().st_mode & 0o777),
        "permissions of the token": oct(token.stat().st_mode & 0o777),
        "listeners": sorted(listeners),
        "seconds for a worker to start": raylet.environ()["RAY_worker_register_timeout_seconds"],
        "error of joining": join.stderr.splitlines()[-1],
    }))
"""


@pytest.mark.slow
def test_ray_requires_a_token_even_if_the_environment_disables_it() -> None:
    """Ray listens at all addresses of the machine, so with `RAY_AUTH_MODE=disabled` anyone could join."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "HOME": folder,
            "RAY_AUTH_MODE": "disabled",
        }
        command = [sys.executable, "-c", _REPORT_ACCESS]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    error = report.pop("error of joining")
    assert error.startswith("ConnectionError: Failed to connect to Ray cluster")
    assert report == {
        "driver uses the token": True,
        "mode of workers": "token",
        "permissions of the folder": "0o700",
        "permissions of the token": "0o600",
        "listeners": ["gcs_server", "ray", "raylet"],  # there is no dashboard
        "seconds for a worker to start": "300",  # Ray's default, 60, is too short on a busy machine
    }


START_ERROR = (
    "cluster.address: local: no Ray starts on this machine in 3 attempts of 30 s; end other work "
    "on it, and run it again"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing_starts", "expected"),
    [(1, ["started", "2 []"]), (3, [START_ERROR, "3 []"])],
)
def test_a_start_that_times_out_is_repeated_and_leaves_no_folder_or_process(
    failing_starts: int, expected: list[str]
) -> None:
    # The path must be short, because Ray creates sockets below it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", _START_FAILS, str(failing_starts)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    assert result.stdout.splitlines()[-2:] == expected, result.stdout + result.stderr


_STOP_DURING_START = """
import os, signal, sys
from pathlib import Path
from unittest import mock
import psutil, ray
from ray._private import services
from mcore_mas.runtime.local_ray import running_ray
from mcore_mas.runtime.stop_signal import Stopped, raise_on_stop_signals

get_node = services.get_node

def get_node_when_stopped(*arguments, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    return get_node(*arguments, **options)

raise_on_stop_signals()
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
def test_a_signal_while_ray_starts_stops_the_run_and_leaves_no_folder_or_process() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", _STOP_DURING_START, str(int(signal.SIGTERM))]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    stopped = "stopped by SIGTERM; the same command continues from what is saved"
    assert result.stdout.splitlines() == [stopped, "[]", "[]"], result.stderr


@pytest.mark.slow
def test_workers_reuse_freed_memory_and_keep_malloc_settings_of_the_environment() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
    environment = inherited | {"MALLOC_TOP_PAD_": "1048576"}
    command = [sys.executable, "-c", _COUNT_PAGE_FAULTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    worker = json.loads(result.stdout.splitlines()[-1])
    assert worker.pop("faults") < 100  # the last array reuses the pages of the one before
    assert worker == KEEP_PAGES | {"MALLOC_TOP_PAD_": "1048576"}


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
        # Jobs on machines that share a home can have the same process id.
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
homes_and_tokens = [tokens.get(timeout=60) for _ in range(HOMES * JOBS)]
for job in jobs:
    job.join()
lengths = {len(token) for _, token in homes_and_tokens}
print([job.exitcode for job in jobs], len(set(homes_and_tokens)), lengths)
"""


def test_jobs_that_start_at_once_in_one_home_share_its_token(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TOKEN_RACE, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # Each of the 200 homes has one token, of 64 characters.
    assert finished.stdout == "[0, 0, 0, 0] 200 {64}\n", finished.stderr[-2000:]
    assert {path.name for path in tmp_path.glob("*/.ray/*")} == {"auth_token"}


def test_uncaught_errors_are_printed_by_python_or_by_the_users_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's hook would wait for its head, which may have ended."""
    monkeypatch.setattr(sys, "excepthook", ray_worker.custom_excepthook)
    monkeypatch.setattr(ray_worker, "normal_excepthook", sys.__excepthook__)
    remove_ray_excepthook()
    assert sys.excepthook is sys.__excepthook__

    def print_briefly(*error: object) -> None:
        print(error)

    monkeypatch.setattr(sys, "excepthook", print_briefly)
    remove_ray_excepthook()
    assert sys.excepthook is print_briefly


def test_later_rays_do_not_look_for_the_forks_of_an_earlier_test() -> None:
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, ray_forks.listen(patch) as listener:
        ray_forks.fork_processes(patch)
        assert os.environ[VARIABLE].encode() == listener.getsockname()[1:]
    assert os.environ == before
