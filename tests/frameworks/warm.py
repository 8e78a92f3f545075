"""Runs an agent program in processes of its own for which its framework is imported once, not for every task.

    warm.py serve SOCKET PACKAGE                run programs in forks
    warm.py ask SOCKET PROGRAM [ARGUMENT...]    have one run with this process's environment and streams

The program is unchanged: it starts as `__main__` in a fresh fork. `{TASK}` in an argument is the variable TASK. What
the first program that ends well has imported is imported here too, so that the forks after it need not: that saves
seconds a task. PACKAGE, "" for none, is left to the forks: its import starts threads, which no fork has, and who waits
for them waits for ever.
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


def serve(place: str, apart: str) -> None:
    """Answer requests until the process is ended."""
    imported = Path(f"{place}.modules")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(place)
        server.listen(128)
        while True:
            asked, _ = server.accept()
            if imported.exists():
                names = imported.read_text().split()
                imported.unlink()
                for name in names:
                    with contextlib.suppress(Exception):
                        if name.partition(".")[0] != apart:
                            importlib.import_module(name)
            if os.fork() == 0:
                server.close()
                _play(asked, imported)
            asked.close()


def _play(asked: socket.socket, imported: Path) -> None:
    given, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    program, arguments, environment = json.loads(given)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [program, *(argument.format_map(environment) for argument in arguments)]
    status, before = 0, set(sys.modules)
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    new = set(sys.modules) - before
    if len(new) > 20 and not status:
        own = imported.with_suffix(f".{os.getpid()}")
        own.write_text(
            "\n".join(sorted(name for name in new if name[0] != "_"))
        )  # those, others import by themselves
        own.rename(imported)
    asked.send(bytes([status]))
    os._exit(status)


def ask(place: str, program: str, *arguments: str) -> int:
    """The exit status of a program."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(place)
        socket.send_fds(
            asked, [json.dumps([program, arguments, dict(os.environ)]).encode()], [0, 1, 2]
        )
        status = asked.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    task, where, *what = sys.argv[1:]
    sys.exit(ask(where, *what) if task == "ask" else serve(where, *what))
