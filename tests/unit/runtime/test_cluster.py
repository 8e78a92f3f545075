"""A run's Ray, started in a process of its own: what its workers inherit."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mcore_mas.runtime import cluster
from mcore_mas.runtime.cluster import KEEP_PAGES, ClusterError, failed_starts, joined_ray
from mcore_mas.runtime.ray_cleanup import tidy
from rollout.base.processes import free_port

_SCRIPT = """
import json, os, resource
import numpy as np, ray
from mcore_mas.runtime import cluster
from mcore_mas.runtime.cluster import KEEP_PAGES, running_ray

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
from mcore_mas.runtime.cluster import ClusterError, running_ray

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
from mcore_mas.runtime.cluster import running_ray

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


def test_a_process_that_ended_before_ray_knew_it_is_told_with_what_it_said_last(
    tmp_path: Path,
) -> None:
    gone = [subprocess.Popen(["true"]) for _ in range(2)]
    assert [process.wait() for process in gone] == [0, 0]
    lines = [
        f"(raylet) worker_pool.cc:564: Started worker process with pid {pid} worker_id=ae"
        for pid in (os.getpid(), gone[0].pid, gone[1].pid)
    ]
    (tmp_path / "raylet.out").write_text("\n".join([*lines, ""]))
    (tmp_path / "raylet.err").write_text(
        "Traceback\nImportError: no libfoo\n[2026-11-28 04:10:25 E] of Ray's own\n"
    )
    (
        tmp_path / f"python-core-spill_worker-ae_{gone[0].pid}.log"
    ).touch()  # Ray knew it before it ended
    with pytest.raises(ClusterError) as caught:
        asyncio.run(asyncio.wait_for(failed_starts(tmp_path), 10))
    assert (
        str(caught.value)
        == f"process {gone[1].pid} of Ray ended as it started: ImportError: no libfoo"
    )
    (tmp_path / "raylet.err").write_text("")
    with pytest.raises(
        ClusterError, match=r"it said nothing; the kernel ends processes where memory is full$"
    ):
        asyncio.run(asyncio.wait_for(failed_starts(tmp_path), 10))
    impatient = f"[2026] Some workers of the worker process({gone[1].pid}) have not registered within the timeout."
    (tmp_path / "raylet.err").write_text(impatient)
    with pytest.raises(TimeoutError):  # Ray has ended it, and starts another
        asyncio.run(asyncio.wait_for(failed_starts(tmp_path), 0.1))


_BROKEN = """
import sys
if any("default_worker.py" in word for word in sys.orig_argv):
    sys.exit("ImportError: libfoo")
"""

_WAITS = """
import asyncio, ray
from mcore_mas.runtime.cluster import failed_starts, running_ray

with running_ray(1, 100) as logs:
    waiting = ray.remote(lambda: 1).remote()
    asyncio.run(failed_starts(logs))
"""


@pytest.mark.slow
def test_rays_processes_that_cannot_start_are_told_at_once(tmp_path: Path) -> None:
    """Ray looks after 300 s, and `ray.init` would wait for its first processes for ever."""
    (tmp_path / "sitecustomize.py").write_text(_BROKEN)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _WAITS]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        " of Ray ended as it started: SystemExit: ImportError: libfoo"
    )


_IN_A_SCRIPT = """
import threading, time
from mcore_mas.runtime.cluster import running_ray

def train():
    with running_ray(1, 100):
        print("up", flush=True)
        time.sleep(600)

training = threading.Thread(target=train)
training.start()
training.join()
"""


def test_sigterm_to_a_script_that_trains_is_not_called_a_sigkill() -> None:
    """A script hears no SIGTERM: it ends at once, and what cleans up behind it says so."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command, pipe = [sys.executable, "-c", _IN_A_SCRIPT], subprocess.PIPE
        with subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as script:
            assert script.stdout is not None and script.stdout.readline() == "up\n"
            script.terminate()
            said = script.communicate(timeout=120)[1].splitlines()
    assert script.returncode == -signal.SIGTERM
    assert (
        said[-1]
        == "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
    )


SLOW = "no Ray starts on this machine in three tries of 30 s; end other work on it, and start this again"


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


def test_workers_keep_the_memory_that_they_free_unless_the_environment_says_otherwise() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
    environment = inherited | {"MALLOC_TOP_PAD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("faults") < 100  # the same pages again
    assert seen == KEEP_PAGES | {"MALLOC_TOP_PAD_": "1048576"}


def test_an_address_where_no_ray_answers_is_told_at_once(tmp_path: Path) -> None:
    port = free_port()
    refused = ((f"{scheme}127.0.0.1:{port}", "Connection refused") for scheme in ("", "ray://"))
    for address, why in (*refused, ("no.such.host.invalid:6379", "known")):
        began = time.monotonic()
        with pytest.raises(ClusterError) as caught, joined_ray(address, tmp_path):
            pass
        assert str(caught.value).startswith(
            f"cluster.address: {address}: this machine cannot join a Ray there ("
        )
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("said", "why"), [(b"", "timed out"), (b"HTTP/1.1 400 Bad Request", "something else than Ray")]
)
def test_an_address_where_something_else_listens_is_told_at_once(
    said: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_DOOR_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(said)
            connection.recv(100)
            time.sleep(1)  # it stays open

        threading.Thread(target=answer, daemon=True).start()
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match=rf"cannot join a Ray there \({why}"),
            joined_ray(address, tmp_path),
        ):
            pass


@pytest.mark.parametrize("keep", [True, False])
def test_a_ray_that_has_ended_leaves_nothing_but_its_logs_where_they_are_wanted(
    tmp_path: Path, keep: bool
) -> None:
    session, logs = tmp_path / "ray" / "session_1", tmp_path / "run" / "ray"
    for folder in (session / "logs", session / "sockets", logs):
        folder.mkdir(parents=True)
    (session / "logs" / "worker.err").write_text("out of memory")
    (logs / "of_before").touch()
    (tmp_path / "ray" / "session_latest").symlink_to(session)
    tidy(session, logs, keep=keep)
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert left == ["run", *(["run/ray", "run/ray/worker.err"] if keep else [])]


def test_another_rays_folder_stays(tmp_path: Path) -> None:
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2")
    tidy(tmp_path / "session_1", None, keep=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["session_2", "session_latest"]


def test_gloo_of_this_wheel_has_no_tls_as_the_page_says() -> None:
    program = """
import os, torch.distributed as dist
os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and done.stderr.rstrip().endswith("unsupported gloo device")
    page = (Path(__file__).parents[3] / "docs/cluster.md").read_text()
    assert f"torch {version('torch').partition('+')[0]})" in page
