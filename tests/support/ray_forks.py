"""Workers and agents of Ray that start as forks of a process that has imported their modules.

Ray starts a script, which imports Ray to prepare the worker's environment, and then the worker,
which imports Ray again, and later the modules of its actor: up to ten seconds of processor time for
a rank of a trainer. Here the script is `tests.support.ray_worker`, which asks this module for a fork.
The worker is a process like any other, with the arguments, environment and streams that Ray gave it.
So are both agents of Ray's node, which otherwise take most of the processor time of Ray's start.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_program import close_descriptors, exit_fork, run_program
from tests.support.ray_worker import JOB_ID, VARIABLE

SCRIPT = str(Path(__file__).with_name("ray_worker.py"))
# With this variable an agent ends when its raylet closes the agent's standard input. Without it, the agent would end at
# once, because its parent is not the raylet.
_AGENTS_READ_A_PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"
_PR_SET_PDEATHSIG = 1
_MAX_REQUEST = 1 << 20  # bytes
_PEER = struct.Struct("3i")  # process, user and group of a connection's other end


def import_ray() -> None:
    """Import Ray with the variables of workers, which it reads only once.

    A worker would also end when the process RAY_RAYLET_PID has ended. Here it ends when its connection
    to the raylet does.
    """
    variables = {"RAY_JOB_ID": JOB_ID, "RAY_RAYLET_PID": "1", _AGENTS_READ_A_PIPE: "1"}
    os.environ.update(variables)
    import aiohttp.web  # noqa: F401
    import ray._private.runtime_env.agent.runtime_env_agent
    import ray.dashboard.agent  # noqa: F401

    for name in variables:
        del os.environ[name]
    leave_out_idle_processes(pytest.MonkeyPatch())


def leave_out_idle_processes(patch: pytest.MonkeyPatch) -> None:
    """Let this process start Rays without the processes that a run does not use.

    The scaler of clusters, the reader of logs and the server of dashboards take three of the five seconds of processor
    time of Ray's start. `test_local_ray.py` starts all of them.
    """
    from ray._private.node import Node

    for method in ("start_monitor", "start_log_monitor", "start_api_server"):
        patch.setattr(Node, method, lambda *_, **__: None)


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Let the Rays that this process starts fork their workers and the agents of their nodes.

    The process that listens at the socket of `tests.support.ray_worker.VARIABLE` forks them.
    """
    from ray._private import ray_constants, services

    patch.setenv(_AGENTS_READ_A_PIPE, "1")
    patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", SCRIPT)
    patch.setattr(
        services,
        "_build_python_executable_command_memory_profileable",
        lambda *_, **__: [sys.executable, SCRIPT],
    )


def listen(patch: pytest.MonkeyPatch) -> socket.socket:
    """Return a socket whose name `patch` puts into this process's environment, where the script reads it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel chooses a name
    listener.listen(64)
    patch.setenv(VARIABLE, listener.getsockname()[1:].decode())
    return listener


def reap_children(*_: object) -> None:
    """Take the exit status of every child that has ended; handles SIGCHLD."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:  # there is no child
        pass


def start_worker(listener: socket.socket) -> None:
    """Accept one request of `tests.support.ray_worker`, and fork the worker."""
    connection, _ = listener.accept()
    with connection:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.getuid():
            return
        message, streams, *_ = socket.recv_fds(connection, _MAX_REQUEST, 3)
        if not os.fork():
            try:
                _run_worker(json.loads(message), streams, connection)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # the worker could not start
        for stream in streams:
            os.close(stream)


def serve(listener: socket.socket) -> None:
    """Fork workers and agents until this process is terminated, or the process that forked it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap_children)
    while True:
        start_worker(listener)


def _run_worker(request: dict[str, Any], streams: list[int], connection: socket.socket) -> None:
    """Become the worker; the script ends when this process's end of the connection is closed."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._raylet import AuthenticationTokenLoader, Config, ObjectID

    if request["leads_group"]:
        os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    close_descriptors(keep=[connection.fileno()])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    arguments = []
    for argument in request["arguments"]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            update_envs(RuntimeEnvContext.deserialize(value).env_vars)
        elif name != "--language":
            arguments.append(argument)

    # Ray has read its settings in the parent. Read them again, from this worker's environment.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    # All forks start with the same random state, in Python and in Ray's generator of ids. Before this loop existed, two
    # workers that started at once used the same id, and one of them crashed.
    random.seed()
    for _ in range(os.getpid() % 1024 * 16):
        ObjectID.from_random()
    exit_fork(run_program([sys.executable, *arguments]))
