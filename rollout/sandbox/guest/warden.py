"""Zygote and wardens: the process that a sandbox clones, and the clones that start, watch and end one job each."""

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from . import box, filters, jail, linux, program, usage, wire

_TICK_S = 0.1  # between looks at what the kernel does not limit by itself
_STACK_BYTES = 256 << 20
_SPARE_BYTES = (
    48 << 20
)  # of the interpreters of a tree whose memory is counted, beyond what programs may have


class _BoxDesk:
    """Hands files of the job's box in and out, for the host."""

    def __init__(self, channel: socket.socket, path: str) -> None:
        self._channel = channel
        self._path = path
        self._box = -1  # descriptor of the box

    def _do_put(self, files: list[int], name: str) -> None:
        self._answer(lambda: box.put(self._box, name, files[0]))

    def _do_get(self, files: list[int], name: str) -> None:
        self._answer(lambda: box.get(self._box, name))

    def _do_list(self, files: list[int]) -> None:
        self._answer(lambda: box.listing(self._path))

    def _answer(self, work: Callable[[], int | None]) -> None:
        """Send what `work` returns, an open file or nothing, or why it could not."""
        try:
            file = work()
        except OSError as error:
            wire.send(self._channel, {"refused": error.strerror})
            return
        wire.send(self._channel, {"done": True}, [] if file is None else [file])
        if file is not None:
            os.close(file)


class Warden(_BoxDesk):
    """Serves one host connection until it closes; then the job's tree, the box and this process end."""

    def __init__(self, channel: socket.socket, settings: dict[str, Any], path: str) -> None:
        """`path` is the job's folder; it exists, or is where jobs of the namespaces tier mount theirs."""
        super().__init__(channel, path)
        self._settings = settings
        self._tier: str = settings["tier"]
        self._limits, self._cores = dict[str, Any](), list[int]()  # those of the host's RunLimits
        self._job = 0  # process id; 0 when none runs
        self._number = 0  # of the job, as the host counts
        self._cpu_s = 0.0  # processor time of earlier jobs
        self._ended = -1  # pidfd of the job
        self._deadline = float("inf")
        self._killed = ""
        self._proc = -1  # an open /proc, where no control group limits the tree's memory

    def run(self, proc: int, user: tuple[int, int], groups: list[int]) -> NoReturn:
        """Settle in, serve, and end this process."""
        status = 1
        try:
            self._settle(proc, user, groups)
            self._serve()
        except EOFError:
            status = 0
        except BaseException as error:
            with suppress(OSError):
                wire.send(self._channel, {"fault": f"{type(error).__name__}: {error}"})
        finally:
            self._end_tree()
            if self._tier != "namespaces":
                box.remove_tree(self._path)
            os._exit(status)

    def _settle(self, proc: int, user: tuple[int, int], groups: list[int]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
        if self._tier == "namespaces":
            jail.enter_job(proc, user)
        for group in groups:
            os.write(group, b"0")
            os.close(group)
        if self._tier == "namespaces" and not groups:
            self._proc = proc
        else:
            os.close(proc)

    def _serve(self) -> None:
        while True:
            watched = select.poll()
            watched.register(self._channel, select.POLLIN)
            if self._job:
                watched.register(self._ended, select.POLLIN)
            ready = {file for file, _ in watched.poll(self._patience_ms())}
            if self._job and (self._ended in ready or self._overdue()):
                self._report()
            if self._channel.fileno() in ready:
                message, files = wire.receive(self._channel)
                getattr(self, f"_do_{message.pop('do')}")(files, **message)

    def _patience_ms(self) -> int | None:
        if not self._job:
            return None
        left_s = self._deadline - time.monotonic()
        if self._tier != "namespaces" or self._proc >= 0:
            left_s = min(left_s, _TICK_S)
        return None if left_s == float("inf") else max(0, int(left_s * 1000) + 1)

    def _overdue(self) -> bool:
        allowed = self._limits
        if time.monotonic() >= self._deadline:
            self._killed = "wall"
        elif self._tier != "namespaces":
            unlinked = usage.unlinked_bytes(self._job)
            if box.overfull(self._path, allowed["disk_mb"] << 20, allowed["files"], unlinked):
                self._killed = "disk"
            elif usage.threads(self._job) > allowed["processes"]:
                self._killed = "threads"
        elif self._proc >= 0 and usage.tree_over(
            self._proc, (allowed["memory_mb"] << 20) + _SPARE_BYTES
        ):
            self._killed = "memory"
        return bool(self._killed)

    def _do_open(self, files: list[int], limits: dict[str, Any], cores: list[int]) -> None:
        self._limits, self._cores = limits, cores
        if self._tier == "namespaces":
            jail.furnish_job(limits["disk_mb"] << 20, limits["files"])
        self._box = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.chdir(self._path)
        linux.prctl(
            linux.SET_DUMPABLE, 0
        )  # the job has our user id and must not look into this process

    def _do_start(self, files: list[int], kind: str, job: int) -> None:
        self._number = job
        self._cpu_s = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
        trouble_out, trouble_in = os.pipe()
        self._job = os.fork()
        if self._job == 0:
            os.close(trouble_out)
            self._become(kind, files, trouble_in)
        os.close(trouble_in)
        for file in files:
            os.close(file)
        trouble = os.read(trouble_out, 4096).decode()  # returns when the job is confined
        os.close(trouble_out)
        if trouble:
            raise OSError(f"the job cannot be confined: {trouble}")
        self._ended = os.pidfd_open(self._job)
        self._killed = ""
        self._deadline = (
            time.monotonic() + self._limits["wall_s"] if kind == "program" else float("inf")
        )

    def _become(self, kind: str, files: list[int], trouble: int) -> NoReturn:
        try:
            self._confine(kind, files, trouble)
        except BaseException as error:
            os.write(trouble, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        try:
            (program.run_main if kind == "program" else program.run_cells)(3)
        finally:
            os._exit(1)

    def _confine(self, kind: str, files: list[int], trouble: int) -> None:
        """Descriptors 0 to 2 and 3, the program or the channel of the cells, are all that the job holds on to."""
        if kind == "program":
            order = [files[1], files[2], files[3], files[0], trouble]
        else:
            null = os.open("/dev/null", os.O_RDWR)
            order = [null, null, null, files[0], trouble]
        high = [
            os.dup(file) for file in order
        ]  # above every target, as the targets themselves may be among them
        while min(high) < len(order):
            high = [os.dup(file) for file in high]
        for target, file in enumerate(high):
            os.dup2(file, target, inheritable=target < 3)
        os.closerange(len(order), 1 << 20)
        os.setsid()
        linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.SET_DUMPABLE, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(HOME=self._path, TMPDIR=self._path)
        sys.path.insert(0, self._path)
        sys.argv = ["main.py"]
        _set_limits(self._settings, self._limits, kind, self._cores)
        if self._tier == "landlock":
            linux.drop_capabilities()
            filters.confine_files(readable=self._settings["readable"], writable=[self._path])
        if self._tier != "unisolated":
            filters.install_filter(processes=self._tier == "namespaces", own_pid=os.getpid())
        for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
            del sys.modules[name]
        os.close(len(order) - 1)

    def _do_interrupt(self, files: list[int]) -> None:
        if self._job:
            os.kill(self._job, signal.SIGINT)

    def _do_rest(self, files: list[int], rests: bool) -> None:
        """Stop all processes of the job between its cells, or let them go on; who is stopped cannot wake another."""
        if self._job:
            self._signal_tree(signal.SIGSTOP if rests else signal.SIGCONT)

    def _do_kill(self, files: list[int]) -> None:
        if self._job:
            self._killed = "asked"
            self._report()

    def _report(self) -> None:
        """End the whole tree, then say how the job ended."""
        status = self._end_tree()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        wire.send(
            self._channel,
            {
                "job": self._number,
                "exit": os.waitstatus_to_exitcode(status),
                "killed": self._killed,
                "cpu_s": _cpu_s(used) - self._cpu_s,
                "memory_bytes": used.ru_maxrss * 1024,
            },
        )

    def _end_tree(self) -> int:
        """Kill and reap every process of the job; the wait status of the first."""
        status = 0
        if not self._job:
            return status
        self._signal_tree(signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                child, its_status = os.wait()
                status = its_status if child == self._job else status
        os.close(self._ended)
        self._job = 0
        return status

    def _signal_tree(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self._tier == "unisolated":
                os.killpg(self._job, number)
            else:  # all that this process namespace holds, but its first process: us; or one process by construction
                os.kill(-1 if self._tier == "namespaces" else self._job, number)


def _cpu_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def _set_limits(
    settings: dict[str, Any], limits: dict[str, Any], kind: str, cores: list[int]
) -> None:
    os.sched_setaffinity(
        0, cores
    )  # what it starts inherits them; the filter lets nobody change them
    bounds = {
        resource.RLIMIT_AS: settings["address_space"] + (limits["memory_mb"] << 20),
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: _STACK_BYTES,
        **dict.fromkeys(
            (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0
        ),
    }
    if (
        settings["tier"] == "namespaces"
    ):  # elsewhere it counts all of a user's processes, which is everybody's
        bounds[resource.RLIMIT_NPROC] = limits["processes"] + 1  # and the warden
    if kind == "program":  # a session's cells are limited one by one, by wall time
        bounds[resource.RLIMIT_CPU] = limits["cpu_s"]
    for which, soft in bounds.items():
        hard = soft + (which == resource.RLIMIT_CPU)  # that SIGXCPU comes before SIGKILL
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


def main() -> None:
    """Be the zygote: serve the host at descriptor argv[1], as argv[2] says (JSON, see `JailPool` on the host's side).

    It is inside the isolation with everything imported, and is cloned once for every job. It never sees a program, its
    input or its output: those are open files that pass straight to the job, so that no job finds another's traces in
    the memory it inherits.
    """
    host = socket.socket(fileno=int(sys.argv[1]))
    settings: dict[str, Any] = json.loads(sys.argv[2])
    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        return
    try:
        if settings["tier"] == "namespaces":
            proc = jail.enter(settings["readable"])
        else:
            proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        sys.path.extend(settings["packages"])
    except OSError as error:
        wire.send(host, {"fault": str(error)})
        return
    # bytes that this process, and so every job at its start, has mapped
    settings["address_space"] = (
        int(usage.read_proc(proc, "self/statm").split()[0]) * usage.PAGE_BYTES
    )
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps wardens
    wire.send(host, {"ready": True})
    _serve_clones(host, settings, proc)


def _serve_clones(host: socket.socket, settings: dict[str, Any], proc: int) -> None:
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
