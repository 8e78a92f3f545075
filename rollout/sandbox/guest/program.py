"""Execution of the model's code, as a program like `python main.py` or as cells of a notebook."""

import _sitebuiltins
import ast
import atexit
import builtins
import contextlib
import gc
import io
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
_PROGRAM_NAME = "main.py"


def run_main(source: int) -> NoReturn:
    """Run the program in the open file `source`, and end this process with its exit status."""
    text = _read_file(source)
    os.close(source)
    module = _new_main_module()
    status = 0
    try:
        _cache_lines(_PROGRAM_NAME, text)
        exec(compile(text, _PROGRAM_NAME, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        status = _report_exception(error)

    try:
        # as the interpreter does at its end: wait for threads, then call the exit functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if b"__del__" in text:
            _free_names(module)
        if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
            sys.stdout.flush()
        _flush_open_files()
    except BaseException as error:
        status = _report_exception(error) or status
    finally:
        os._exit(status & 255)


def _free_names(module: types.ModuleType) -> None:
    """Free the values of a module, so that their finalizers run.

    As the interpreter does, free names with a single leading underscore first.
    """
    first_names = []
    other_names = []
    for name in vars(module):
        if name.startswith("_") and not name.startswith("__"):
            first_names.append(name)
        elif name != "__builtins__":
            other_names.append(name)
    for name in first_names + other_names:
        vars(module)[name] = None
    gc.collect()


def _flush_open_files() -> None:
    """Flush all files that the program has open, as the interpreter does when it frees them.

    The standard streams were opened before the program, in objects that are hidden from `gc`.
    """
    for value in (sys.__stdout__, sys.__stderr__, *gc.get_objects()):
        if issubclass(type(value), io.IOBase):
            # A file may be closed, or of a class of the program's own.
            with contextlib.suppress(Exception):
                value.flush()


def run_cells(channel: int) -> NoReturn:
    """Run the cells that the host sends through the descriptor `channel` until it is closed."""
    # Without the explicit family and type Python would ask for them, with refused system calls.
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, channel)
    scope = _new_main_module().__dict__
    cell_count = 0
    while True:
        try:
            request, (source, stdout, stderr) = wire.receive(host)
        except KeyboardInterrupt:  # an interrupt that came just after the end of its cell
            continue
        except (EOFError, OSError):
            os._exit(0)
        cell_count += 1
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        text = _read_file(source)
        for file in (source, stdout, stderr):
            os.close(file)
        error = _run_cell(text, f"cell {cell_count}", scope)
        wire.send(host, {"error": error, "token": request["token"]})


def _run_cell(text: bytes, name: str, scope: dict[str, Any]) -> str:
    """Run one cell and print the value of its last expression.

    Returns:
        Name of the exception with which the cell failed; "" if it succeeded. `exit(0)` is a success.
    """
    error_name = ""
    try:
        _cache_lines(name, text)
        tree = ast.parse(text, name)
        last_expression = None
        last_statement = tree.body[-1] if tree.body else None
        if isinstance(last_statement, ast.Expr):
            tree.body.pop()
            last_expression = ast.Expression(last_statement.value)
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        if last_expression is not None:
            value = eval(compile(last_expression, name, "eval", dont_inherit=True), scope)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        exit_status = _report_exception(error)
        if exit_status != 0:
            # The host looks for the name MemoryError; NumPy's error is a subclass with another name.
            is_memory_error = isinstance(error, MemoryError)
            error_name = "MemoryError" if is_memory_error else type(error).__name__

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException as error:
            error_name = error_name or type(error).__name__
    return error_name


def _read_file(file: int) -> bytes:
    """Return the content of an open file."""
    return os.pread(file, os.fstat(file).st_size, 0)


def _new_main_module() -> types.ModuleType:
    """Replace the `__main__` of this process by an empty module."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=_PROGRAM_NAME)
    # The module `site`, which the interpreter starts without here, defines these two functions.
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")
    sys.modules["__main__"] = module
    return module


def _cache_lines(name: str, text: bytes) -> None:
    """Let tracebacks quote the lines of `text`."""
    lines = text.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)


def _report_exception(error: BaseException) -> int:
    """Print an exception without the frame of this module; return the program's exit status."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return 1

    program_frames = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        traceback.print_exception(type(error), error, program_frames)
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())
    return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
