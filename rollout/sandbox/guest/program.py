"""The model's program, run as `python main.py` would run it."""

from __future__ import annotations

import atexit
import builtins
import linecache
import os
import sys
import threading
import traceback
import types
from typing import NoReturn

OUT_OF_MEMORY = 251  # exit status of a program that a MemoryError ended
_NAME = "main.py"


def run_main(source: int) -> NoReturn:
    """Run the program in the open file `source` and end this process with its exit status."""
    text = read_all(source)
    os.close(source)
    module = new_main()
    status = 0
    try:
        remember(_NAME, text)
        exec(compile(text, _NAME, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        status = report_error(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        status = report_error(error) or status
    finally:
        os._exit(status & 255)


def read_all(file: int) -> bytes:
    """All of an open file, from its start."""
    return os.pread(file, os.fstat(file).st_size, 0)


def new_main() -> types.ModuleType:
    """An empty `__main__` in place of our own."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=_NAME)
    sys.modules["__main__"] = module
    return module


def remember(name: str, text: bytes) -> None:
    """Let tracebacks quote the lines of `text`."""
    lines = text.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)


def report_error(error: BaseException) -> int:
    """Print what an exception prints, without our own frames; the exit status it stands for."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    try:
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())
    return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
