"""Programs that start as forks of a process which has imported what they need: in tenths of a second, not in five.

Such a program is a process like another: a child of the test, with its own streams, environment and signals. It has
the modules of `tests.support.preloaded`, and what those read of the environment when they were imported.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_libc = ctypes.CDLL(None, use_errno=True)


def preload() -> None:
    """Have the process that all forks are of import what they need."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])


class _Given:
    """A descriptor that is handed to the process which is being started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _taken, (reduction.DupFd(self._number),)


def _taken(given: Any) -> int:
    return int(given.detach())


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a process is started with."""

    words: list[str]  # an interpreter, its options, and `-m` a module or `-c` a program with its arguments
    cwd: str
    env: dict[str, str]
    streams: dict[int, Any]  # stdin, stdout and stderr; each a `_Given`, and a descriptor in the process
    session: bool
    before: Callable[[], object] | None
    told: Connection  # gets the process's id

    def __call__(self) -> None:
        """Become the program: a fork of this process, whose parent ends at once, so that it is the test's child."""
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        if self.session:
            os.setsid()
        self.told.send(os.getpid())
        for number, given in self.streams.items():  # all of which lie above them
            os.dup2(given, number)
        kept = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # all have the test's
        os.closerange(len(self.streams), kept)
        os.closerange(kept + 1, 1 << 16)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        if self.before:
            self.before()
        _end(_status(self.words))


def _streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _status(words: Sequence[str]) -> int:
    """Run the program; its exit status."""
    _streams()
    at = next(number for number, word in enumerate(words) if word in ("-m", "-c"))
    if "ignore" in words[:at]:
        warnings.simplefilter("ignore")
    name, sys.argv = words[at + 1], [words[at], *words[at + 2 :]]
    sys.path.insert(0, str(Path.cwd()))
    try:
        if words[at] == "-c":
            program = os.memfd_create("program")
            os.write(program, name.encode())
            runpy.run_path(f"/proc/self/fd/{program}", run_name="__main__")
        else:
            spec = importlib.util.find_spec(name)
            package = spec is not None and spec.submodule_search_locations is not None
            sys.modules.pop(f"{name}.__main__" if package else name, None)  # it runs as `__main__`
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(status: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks what runs this interpreter with `-m` or `-c`; any other command starts as ever."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        """As `subprocess.Popen._execute_child`, whose other arguments `rest` has in their order."""
        words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        if not _forks(words):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        pipes, session = rest[3:9], rest[14]
        own = (pipes[0], pipes[3], pipes[5])  # its ends of stdin, stdout and stderr
        given = {number: pipe if pipe != -1 else number for number, pipe in enumerate(own)}
        self.pid = _started(words, cwd, env, given, session, preexec_fn)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _forks(words: Sequence[str]) -> bool:
    options = words[1:-1]
    at = next((number for number, word in enumerate(options) if word in ("-m", "-c")), None)
    return at is not None and words[0] == sys.executable and set(options[:at]) <= {"-W", "ignore", "-u"}


def _started(
    words: Sequence[str],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    streams: Mapping[int, int],
    session: bool,
    before: Callable[[], object] | None,
) -> int:
    """The id of a new process that runs the words."""
    preload()
    heard, told = multiprocessing.Pipe(duplex=False)
    start = _Start(
        words=list(words),
        cwd=os.fspath(cwd or Path.cwd()),
        env=dict(os.environ if env is None else env),
        streams={number: _Given(given) for number, given in streams.items()},
        session=session,
        before=before,
        told=told,
    )
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # of the forks, whose parents end
    try:
        between = multiprocessing.get_context("forkserver").Process(target=start)
        between.start()
        told.close()
        pid = int(heard.recv())
        between.join()
    finally:
        _libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        heard.close()
    return pid
