"""Python programs that start as forks of a server process, which has imported their modules.

They start in tenths of a second instead of five seconds. Otherwise such a program is like any other:
it is a child of the test, with its own streams, environment and signals. It has the modules of
`tests.support.preloaded`, with the values that they read from the environment at their import.

Programs that it starts in its turn, such as the jobs of a workflow, start in the same way: as forks
of a helper process that the program keeps for them. So do the workers of its Ray.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.support import ray_forks
from tests.support.forked_program import (
    close_descriptors,
    exit_fork,
    program_position,
    run_program,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Command line by which Snakemake runs a script of a workflow
_SNAKEMAKE_JOB = re.compile(r"\s*(?:set -euo pipefail;)?\s*(\S+) (\S+\.py)\s*")
_libc = ctypes.CDLL(None, use_errno=True)

# Variables that libraries read at their import
_IMPORT_VARIABLES = re.compile(r"HF_(?!TOKEN\b)|TRITON_|TRANSFORMERS_")
_ENVIRONMENT_AT_IMPORT = {
    name: value for name, value in os.environ.items() if _IMPORT_VARIABLES.match(name)
}

# While a process starts, this process adopts all orphans; so only one thread at a time starts one.
_start_lock = threading.Lock()
# In a fork: connection to the helper process that forks this process's programs
_fork_helper: Connection | None = None


def preload() -> None:
    """Let multiprocessing's fork server import the modules of the forks."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])


class _SentDescriptor:
    """File descriptor that is sent to a process when it starts; unpickled, it is a number there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _receive_descriptor, (reduction.DupFd(self._number),)


def _receive_descriptor(duplicate: Any) -> int:
    return int(duplicate.detach())


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Arguments of a process's start; calling it in a fork runs the program.

    Attributes:
        words: an interpreter, its options, and a script, `-m MODULE` or `-c PROGRAM`, with its
            arguments.
        streams: stdin, stdout and stderr; each a `_SentDescriptor`, and a number in the fork.
        pid_pipe: likewise; pipe that the process writes its id to.
        new_session: True if the process leads a new session.
        process_group: group of processes that it joins; 0 for a new one, -1 for its parent's.
        preexec: function that is called before the program runs.
    """

    words: list[str]
    cwd: str
    env: dict[str, str]
    streams: list[Any]
    pid_pipe: Any
    new_session: bool
    process_group: int
    preexec: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Fork and exit; in the fork, which the test's process adopts, run the program."""
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.001)

        if self.new_session:
            os.setsid()
        elif self.process_group >= 0:
            os.setpgid(0, self.process_group)
        os.write(self.pid_pipe, str(os.getpid()).encode())
        for number, stream in enumerate(self.streams):  # their numbers are above 2
            os.dup2(stream, number)
        close_descriptors(keep=())
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        if self.preexec is not None:
            self.preexec()
        _start_fork_helper()
        exit_fork(run_program(self.words))


@contextmanager
def forked_ray_workers() -> Iterator[None]:
    """Let the Rays that this process starts in this block fork their workers."""
    preload()
    with pytest.MonkeyPatch.context() as patch, ray_forks.listen(patch) as listener:
        server = multiprocessing.get_context("forkserver").Process(
            target=ray_forks.serve, args=(listener,)
        )
        server.start()
        ray_forks.leave_out_idle_processes(patch)
        ray_forks.fork_processes(patch)
        try:
            yield
        finally:
            server.terminate()
            server.join()


def _start_fork_helper() -> None:
    """Fork a helper process from this one, and let `subprocess.Popen` and Ray start programs from it."""
    global _fork_helper
    _fork_helper, requests = multiprocessing.Pipe()
    patch = pytest.MonkeyPatch()
    ray_workers = ray_forks.listen(patch)
    ray_forks.fork_processes(patch)
    subprocess.Popen = Forked  # type: ignore[misc]
    if os.fork():
        requests.close()
        ray_workers.close()
        return

    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _fork_helper.close()
    null = os.open(os.devnull, os.O_RDWR)
    # If the helper kept the streams open, their readers would wait for its end too.
    for number in range(3):
        os.dup2(null, number)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, ray_forks.reap_children)
    while True:
        if ray_workers in wait([requests, ray_workers]):
            ray_forks.start_worker(ray_workers)
            continue
        try:
            start = requests.recv()
        except EOFError:
            os._exit(0)
        descriptors = [reduction.recv_handle(requests) for _ in range(4)]
        if not os.fork():
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _Start(**start, streams=descriptors[:3], pid_pipe=descriptors[3])()
        for descriptor in descriptors:
            os.close(descriptor)


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks commands of this Python interpreter; it starts others as usual."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        """Start the process; `rest` are more arguments of `subprocess.Popen._execute_child`."""
        by_shell = bool(rest[2])
        pipes = rest[3:9]
        words = _command_words(args, by_shell=by_shell)
        environment = dict(os.environ if env is None else env)
        if (
            program_position(words) is None
            or pass_fds
            or not _can_be_pickled(preexec_fn)
            or _import_variables_differ(environment)
        ):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )  # type: ignore[misc]
            return

        start: dict[str, Any] = {
            "words": words,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": environment,
            "new_session": bool(rest[14]),
            "process_group": rest[15],
            "preexec": preexec_fn,
        }
        child_ends = (pipes[0], pipes[3], pipes[5])  # of stdin, stdout and stderr; -1 to inherit
        streams = [number if end == -1 else end for number, end in enumerate(child_ends)]
        with _start_lock:
            self.pid = _start_process(start, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _import_variables_differ(environment: Mapping[str, str]) -> bool:
    """Return True if the imported modules would have read other values from this environment."""
    values = {name: value for name, value in environment.items() if _IMPORT_VARIABLES.match(name)}
    return values != _ENVIRONMENT_AT_IMPORT


def _can_be_pickled(preexec: object) -> bool:
    """Return True if another process can get the function; nested functions cannot be sent."""
    try:
        reduction.ForkingPickler.dumps(preexec)
    except (AttributeError, TypeError):
        return False
    return True


def _command_words(args: object, *, by_shell: bool) -> list[str]:
    """Return the words of a command; [] for shell commands other than Snakemake's jobs."""
    if isinstance(args, list | tuple):
        return [] if by_shell else [os.fspath(word) for word in args]
    if by_shell and isinstance(args, str):
        job = _SNAKEMAKE_JOB.fullmatch(args)
        if job is not None:
            return [*job.groups()]
    return []


def _start_process(start: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Start a fork with these arguments of `_Start`; return its process id."""
    pid_reader, pid_writer = os.pipe()
    # Adopts the fork, whose parent exits.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        if _fork_helper is not None:
            _fork_helper.send(start)
            for descriptor in (*streams, pid_writer):
                reduction.send_handle(_fork_helper, descriptor, None)
        else:
            preload()
            target = _Start(
                **start,
                streams=[_SentDescriptor(stream) for stream in streams],
                pid_pipe=_SentDescriptor(pid_writer),
            )
            multiprocessing.get_context("forkserver").Process(target=target).start()
        os.close(pid_writer)
        return int(os.read(pid_reader, 20))
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        os.close(pid_reader)
