"""The process that a sandbox keeps: inside the isolation, everything imported, cloned once for every job.

It never sees a program, its input or its output: those are open files that pass straight to the job, so that no job
finds another's traces in the memory it inherits.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

from . import jail, linux, wire
from .warden import Warden


def main() -> None:
    """Serve the host at descriptor argv[1], as argv[2] says (JSON, see `Zygote` on the host's side)."""
    host = socket.socket(fileno=int(sys.argv[1]))
    settings: dict[str, Any] = json.loads(sys.argv[2])
    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        return
    try:
        proc = _enter(settings)
        sys.path.extend(settings["packages"])
        for name in settings["preload"]:
            importlib.import_module(name)
    except (OSError, ImportError) as error:
        wire.send(host, {"fault": str(error)})
        return
    settings["address_space"] = _address_space(proc)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps wardens
    wire.send(host, {"ready": True})
    _serve(host, settings, proc)


def _enter(settings: dict[str, Any]) -> int:
    if settings["tier"] == "namespaces":
        return jail.enter(settings["readable"])
    return os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _serve(host: socket.socket, settings: dict[str, Any], proc: int) -> None:
    namespaces = settings["tier"] == "namespaces"
    user = (os.geteuid(), os.getegid())
    while True:
        try:
            request, (channel, *groups) = wire.receive(host)
        except EOFError:
            return
        if (linux.clone(jail.JOB_NAMESPACES) if namespaces else os.fork()) == 0:
            host.close()
            warden = Warden(socket.socket(fileno=channel), settings, request.get("box", jail.BOX))
            warden.run(proc, user, groups)
        for file in (channel, *groups):
            os.close(file)


def _address_space(proc: int) -> int:
    """Bytes that this process, and so every job at its start, has mapped."""
    file = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    try:
        return int(os.read(file, 4096).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)
