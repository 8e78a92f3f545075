"""Fork server for an agent program, so that its framework is imported once and not for every task.

    warm.py serve SOCKET PACKAGE                run programs in forks of this process
    warm.py ask SOCKET PROGRAM [ARGUMENT...]    have a program run with this process's environment and streams

The unchanged program starts as `__main__` in a new fork. `{TASK}` in an argument stands for the variable TASK. When the
first program has succeeded, the server imports the modules that it imported, so that later forks have them already:
this saves seconds per task. PACKAGE, or "" for none, is imported in the forks only, because its import starts threads.
A fork has no copy of these threads, and would wait for them for ever.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path


def serve(address: str, imported_late: str) -> None:
    """Run programs on request until this process is ended."""
    modules_file = Path(f"{address}.modules")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen(128)
        while True:
            connection, _ = server.accept()
            if modules_file.exists():
                names = modules_file.read_text().split()
                modules_file.unlink()
                for name in names:
                    if name.partition(".")[0] != imported_late:
                        with contextlib.suppress(Exception):
                            importlib.import_module(name)
            if os.fork() == 0:
                server.close()
                _run_program(connection, modules_file)
            connection.close()


def _run_program(connection: socket.socket, modules_file: Path) -> None:
    """Run the requested program in this process, send its exit status, and end this process."""
    request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    program, arguments, environment = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [program, *(argument.format_map(environment) for argument in arguments)]
    status = 0
    modules_before = set(sys.modules)
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    new_modules = set(sys.modules) - modules_before
    if len(new_modules) > 20 and status == 0:
        # Modules whose names begin with "_" are imported by others.
        names = sorted(name for name in new_modules if not name.startswith("_"))
        partial_file = modules_file.with_suffix(f".{os.getpid()}")
        partial_file.write_text("\n".join(names))
        partial_file.rename(modules_file)
    connection.send(bytes([status]))
    os._exit(status)


def ask(address: str, program: str, *arguments: str) -> int:
    """Have the server run a program with this process's streams; return its exit status."""
    request = json.dumps([program, arguments, dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        socket.send_fds(connection, [request], [0, 1, 2])
        status = connection.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    command, address, *arguments = sys.argv[1:]
    if command == "ask":
        sys.exit(ask(address, *arguments))
    serve(address, *arguments)
