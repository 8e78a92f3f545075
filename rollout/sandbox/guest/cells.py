"""The model's cells, one after the other in one process and one namespace, like a notebook's."""

from __future__ import annotations

import ast
import os
import socket
import sys
from typing import Any, NoReturn

from . import program, wire


def run_cells(channel: int) -> NoReturn:
    """Serve the host at the descriptor `channel` until it closes."""
    host = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, channel
    )  # asked for its kind, it would need more calls
    scope = program.new_main().__dict__
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
        text = program.read_all(source)
        for file in (source, out, err):
            os.close(file)
        wire.send(host, {"error": _run(text, f"cell {number}", scope)})


def _run(text: bytes, name: str, scope: dict[str, Any]) -> str:
    """Run one cell and show its last expression; the name of the exception that ended it, or ""."""
    try:
        program.remember(name, text)
        tree = ast.parse(text, name)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), name, "eval", dont_inherit=True), scope)
            if value is not None:
                print(repr(value))
        error = ""
    except SystemExit as end:
        error = "SystemExit" if program.report_error(end) else ""
    except MemoryError as end:
        program.report_error(end)
        error = "MemoryError"
    except BaseException as end:
        program.report_error(end)
        error = type(end).__name__
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException as end:
            error = error or type(end).__name__
    return error
