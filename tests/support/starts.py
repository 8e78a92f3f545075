"""Programs that start as forks of a process which has imported what they need: in tenths of a second, not in five.

Such a program is a process like another: a child of the test, with its own streams, environment and signals. It has
the modules of `tests.support.preloaded`, and what those read of the environment when they were imported. What it
starts in its turn, such as the jobs of a workflow, starts in the same way: as forks of a child that it has for that.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import multiprocessing
import os
import re
import runpy
import signal
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

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_JOB = re.compile(
    r"\s*(?:set -euo pipefail;)?\s*(\S+) (\S+\.py)\s*"
)  # a script of a workflow, as Snakemake starts it
_libc = ctypes.CDLL(None, use_errno=True)
_NAMES = re.compile("HF_|TRITON_|TRANSFORMERS_")  # of what libraries read when they are imported
_READ = {name: value for name, value in os.environ.items() if _NAMES.match(name)}
_one_by_one = (
    threading.Lock()
)  # threads start processes; whose parent is this process while it says so
_forks_of: Connection | None = None  # in a fork: the child of which all are forks that it starts


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

    words: list[
        str
    ]  # an interpreter, its options, and a script, `-m` a module or `-c` a program with its arguments
    cwd: str
    env: dict[str, str]
    streams: list[Any]  # stdin, stdout and stderr; each a `_Given`, and a descriptor in the process
    told: Any  # likewise: gets the process's id
    session: bool  # of its own
    group: int  # of processes, which it joins; 0: makes, -1: its parent's
    before: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Become the program: a fork of this process, whose parent ends at once, so that it is the test's child."""
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        if self.session:
            os.setsid()
        elif self.group >= 0:
            os.setpgid(0, self.group)
        os.write(self.told, str(os.getpid()).encode())
        for number, given in enumerate(self.streams):  # all of which lie above them
            os.dup2(given, number)
        kept = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # all have the test's
        os.closerange(len(self.streams), kept)
        os.closerange(kept + 1, 1 << 16)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        if self.before:
            self.before()
        _fork_in_turn()
        _end(_status(self.words))


def _fork_in_turn() -> None:
    """Have this process, as it is now, a child of which all are forks that it starts."""
    global _forks_of
    _forks_of, asked = multiprocessing.Pipe()
    subprocess.Popen = Forked  # type: ignore[misc]
    if os.fork():
        asked.close()
        return
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _forks_of.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # else who reads them waits for this process, too
        os.dup2(nothing, number)
    heard = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    while True:
        try:
            start = asked.recv()
        except EOFError:
            os._exit(0)
        *streams, told = given = [reduction.recv_handle(asked) for _ in range(4)]
        if not os.fork():
            for number, handler in heard.items():
                signal.signal(number, handler)
            _Start(**start, streams=streams, told=told)()
        os.wait()
        for number in given:
            os.close(number)


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
    at = _program(words)
    assert at is not None
    if "ignore" in words[:at]:
        warnings.simplefilter("ignore")
    script = words[at].endswith(".py")
    name, sys.argv = (
        (words[at], words[at:]) if script else (words[at + 1], [words[at], *words[at + 2 :]])
    )
    if "-P" not in words[:at]:
        sys.path.insert(0, str(Path(name).resolve().parent if script else Path.cwd()))
    try:
        if script:
            runpy.run_path(name, run_name="__main__")
        elif words[at] == "-c":
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
    """`subprocess.Popen` that forks what this interpreter runs; any other command starts as ever."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        """As `subprocess.Popen._execute_child`, whose other arguments `rest` has in their order."""
        words = _words(args, line=bool(rest[2]))
        start: dict[str, Any] = {
            "words": words,
            "session": bool(rest[14]),
            "group": rest[15],
            "before": preexec_fn,
        }
        start |= {
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        if (
            _program(words) is None
            or pass_fds
            or not _can_be_told(preexec_fn)
            or _imports_apart(start["env"])
        ):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )  # type: ignore[misc]
            return
        pipes = rest[3:9]
        own = (pipes[0], pipes[3], pipes[5])  # its ends of stdin, stdout and stderr
        given = [pipe if pipe != -1 else number for number, pipe in enumerate(own)]
        self.pid = _started(start, given)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _imports_apart(env: Mapping[str, str]) -> bool:
    """Whether what has been imported would have read other values of an environment."""
    return {name: value for name, value in env.items() if _NAMES.match(name)} != _READ


def _can_be_told(before: object) -> bool:
    """Whether another process can find what is to be called: a function of a module, not one within another."""
    try:
        reduction.ForkingPickler.dumps(before)
    except (AttributeError, TypeError):
        return False
    return True


def _words(args: object, *, line: bool) -> list[str]:
    if isinstance(args, list | tuple):
        return [] if line else [os.fspath(word) for word in args]
    job = _JOB.fullmatch(args) if isinstance(args, str) and line else None
    return [*job.groups()] if job else []


def _program(words: Sequence[str]) -> int | None:
    """Where a command names its program; None where it is not this interpreter's, or has options unknown here."""
    at = next(
        (n for n, word in enumerate(words[1:], 1) if word in ("-m", "-c") or word.endswith(".py")),
        None,
    )
    if at is None or words[0] != sys.executable:
        return None
    known = {"-W", "ignore", "-u"} | (set() if words[at].endswith(".py") else {"-P"})
    return at if {*words[1:at]} <= known else None


def _started(start: Mapping[str, Any], streams: Sequence[int]) -> int:
    """The id of a new process."""
    with _one_by_one:
        return _started_alone(start, streams)


def _started_alone(start: Mapping[str, Any], streams: Sequence[int]) -> int:
    heard, told = os.pipe()
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # of the forks, whose parents end
    try:
        if _forks_of:
            _forks_of.send(start)
            for number in (*streams, told):
                reduction.send_handle(_forks_of, number, None)
        else:
            preload()
            target = _Start(
                **start, streams=[_Given(stream) for stream in streams], told=_Given(told)
            )
            multiprocessing.get_context("forkserver").Process(target=target).start()
        os.close(told)
        return int(os.read(heard, 20))
    finally:
        _libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        os.close(heard)
