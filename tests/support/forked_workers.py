"""Workers of pytest-xdist that start as forks of pytest's process, which has imported the modules of the tests.

The imports take ten seconds of processor time, which each worker, and the fork server of each worker, would spend
again.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from types import ModuleType

import pytest
from execnet import XSpec, gateway_base, gateway_io

from tests.support import starts
from tests.support.forked_program import (
    close_descriptors,
    exit_fork,
    open_streams,
    run_program,
)


class _WorkerPipes(gateway_base.Popen2IO):
    """Pipes of execnet to a worker, which is forked when this object is made."""

    def __init__(self, spec: XSpec, execmodel: gateway_base.ExecModel) -> None:
        worker_input, own_output = os.pipe()
        own_input, worker_output = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _run_worker(spec, worker_input, worker_output)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # the worker could not start
        os.close(worker_input)
        os.close(worker_output)
        super().__init__(os.fdopen(own_output, "wb"), os.fdopen(own_input, "rb"), execmodel)

    def wait(self) -> int | None:
        """Wait for the worker's end; return its exit status, or None if another call has waited for it."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:
            return None

    def kill(self) -> None:
        """Kill the worker, if it has not been waited for."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def fork_workers(specs: Sequence[XSpec]) -> None:
    """Import the modules of the tests, and fork a worker for each specification; execnet will use these workers.

    All are forked now, because execnet starts threads for each worker that it connects to.
    """
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries
        import tests.support.preloaded_modules  # noqa: F401

    os.environ.clear()  # of the variables that the modules need at their import
    os.environ.update(environment)

    create_io = gateway_io.create_io
    execmodel = gateway_base.get_execmodel("thread")
    workers = {
        spec.id: _WorkerPipes(spec, execmodel) for spec in specs if spec.popen and not spec.python
    }

    def use_worker(spec: XSpec, execmodel: gateway_base.ExecModel) -> gateway_base.Popen2IO:
        """Return the pipes of a forked worker, or of a new interpreter that replaces a worker that crashed."""
        return workers.pop(spec.id, None) or create_io(spec, execmodel)

    gateway_io.create_io = use_worker


def _run_worker(spec: XSpec, worker_input: int, worker_output: int) -> None:
    """Serve execnet's requests, as the program does that execnet sends to a new interpreter; then exit."""
    os.dup2(worker_input, 0)
    os.dup2(worker_output, 1)
    close_descriptors(keep=())
    open_streams()
    random.seed()  # forks start with the same random state
    for handler in [*logging.root.handlers]:
        if isinstance(handler, logging.FileHandler):  # of pytest, whose descriptor is closed here
            logging.root.removeHandler(handler)
    sys.modules["__main__"] = ModuleType("__main__")

    sys.stdin.readline()  # execnet's program
    sys.stdout.write("1")
    sys.stdout.flush()
    execmodel = gateway_base.get_execmodel(spec.execmodel)
    gateway_base.serve(gateway_base.init_popen_io(execmodel), id=f"{spec.id}-worker")
    exit_fork(0)


def start_fork_server() -> None:
    """Start multiprocessing's fork server as a fork of this process, if this process has the server's modules."""
    if "tests.support.preloaded_modules" not in sys.modules:
        return
    starts.preload()
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_server)
        forkserver.ensure_running()


def _fork_server(path: object, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork a process that runs the program of this command; return its process id."""
    pid = os.fork()
    if pid == 0:
        close_descriptors(keep=descriptors)
        exit_fork(run_program([sys.executable, "-c", arguments[-1]]))
    return pid
