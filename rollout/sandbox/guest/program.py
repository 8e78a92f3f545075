"""The model's code: a program, run as `python main.py` would run it, or cells in one process, like a notebook's."""

import ast
import atexit
import builtins
import linecache
import os
import socket
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from . import wire

OUT_OF_MEMORY = 251  # exit status of a program that a MemoryError ended
_NAME = "main.py"


def run_main(source: int) -> NoReturn:
    """Run the program in the open file `source` and end this process with its exit status."""
    text = _read_all(source)
    os.close(source)
    module = _new_main()
    status = 0
    try:
        _remember(_NAME, text)
        exec(compile(text, _NAME, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        status = _report_error(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        status = _report_error(error) or status
    finally:
        os._exit(status & 255)


def run_cells(channel: int) -> NoReturn:
    """Serve the host at the descriptor `channel` until it closes."""
    # were it not told the socket's kind, Python would ask by calls that are refused here
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, channel)
    scope = _new_main().__dict__
    number = 0
    while True:
        try:
            _, (source, out, err) = wire.receive(host)
        except KeyboardInterrupt:  # meant for a cell that has just ended
            continue
        except (EOFError, OSError):
            os._exit(0)
        number += 1
        os.dup2(out, 1)
        os.dup2(err, 2)
        text = _read_all(source)
        for file in (source, out, err):
            os.close(file)
        wire.send(host, {"error": _run_cell(text, f"cell {number}", scope)})


def _run_cell(text: bytes, name: str, scope: dict[str, Any]) -> str:
    """Run one cell and show its last expression; the name of the exception that ended it, or ""."""
    try:
        _remember(name, text)
        tree = ast.parse(text, name)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        if isinstance(shown, ast.Expr):
            value = eval(
                compile(ast.Expression(shown.value), name, "eval", dont_inherit=True), scope
            )
            if value is not None:
                print(repr(value))
        error = ""
    except BaseException as end:
        kind = "MemoryError" if isinstance(end, MemoryError) else type(end).__name__
        error = kind if _report_error(end) else ""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException as end:
            error = error or type(end).__name__
    return error


def _read_all(file: int) -> bytes:
    """All of an open file, from its start."""
    return os.pread(file, os.fstat(file).st_size, 0)


def _new_main() -> types.ModuleType:
    """An empty `__main__` in place of our own."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=_NAME)
    sys.modules["__main__"] = module
    return module


def _remember(name: str, text: bytes) -> None:
    """Let tracebacks quote the lines of `text`."""
    lines = text.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)


def _report_error(error: BaseException) -> int:
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
