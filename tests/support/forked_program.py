"""Run a Python program in a fork, as an interpreter runs it."""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path


def program_position(words: Sequence[str]) -> int | None:
    """Return the index of the script, `-m` or `-c` of a command.

    Return None if the command is not of this interpreter, or has options that a fork ignores.
    """
    if not words or words[0] != sys.executable:
        return None
    for position, word in enumerate(words[1:], 1):
        is_script = word.endswith(".py")
        if is_script or word in ("-m", "-c"):
            supported = {"-W", "ignore", "-u"}
            if not is_script:
                supported.add("-P")
            return position if {*words[1:position]} <= supported else None
    return None


def _open_streams() -> None:
    """Open Python's standard streams anew, as an interpreter does at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__ = sys.stdin
    sys.__stdout__ = sys.stdout
    sys.__stderr__ = sys.stderr


def close_descriptors(*, keep: Iterable[int]) -> None:
    """Close all descriptors above 2 but these, and that of the resource tracker, which a test's processes share."""
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    start = 3
    for number in sorted([*keep, *([] if tracker is None else [tracker])]):
        os.closerange(start, number)
        start = number + 1
    os.closerange(start, 1 << 16)


def run_program(words: Sequence[str]) -> int:
    """Run the program of a command in this process; return its exit status."""
    _open_streams()
    position = program_position(words)
    assert position is not None
    options = words[:position]
    if "ignore" in options:
        warnings.simplefilter("ignore")

    is_script = words[position].endswith(".py")
    if is_script:
        name = words[position]
        sys.argv = list(words[position:])
        folder = Path(name).resolve().parent
    else:
        name = words[position + 1]
        sys.argv = [words[position], *words[position + 2 :]]
        folder = Path.cwd()
    if "-P" not in options:
        sys.path.insert(0, str(folder))

    try:
        if is_script:
            runpy.run_path(name, run_name="__main__")
        elif words[position] == "-c":
            program = os.memfd_create("program")
            os.write(program, name.encode())
            runpy.run_path(f"/proc/self/fd/{program}", run_name="__main__")
        else:
            spec = importlib.util.find_spec(name)
            is_package = spec is not None and spec.submodule_search_locations is not None
            # The module may have been imported; it must run anew as `__main__`.
            sys.modules.pop(f"{name}.__main__" if is_package else name, None)
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


def exit_fork(status: int) -> None:
    """End this process as an interpreter does, without the exit functions of its ancestors."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)
