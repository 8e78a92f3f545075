"""Zygote and wardens: the process that a sandbox clones, and the clones, each of which runs jobs in one box."""

import errno
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

_CHECK_S = 0.1  # interval between checks of limits that the kernel does not enforce
_STACK_BYTES = 256 << 20
# Memory of the interpreters in a process tree, in addition to that of their programs.
_SPARE_BYTES = 48 << 20
_MAX_FILES = 1 << 20
# Errors of the machine, which say nothing about the file that is written.
_MACHINE_ERRORS = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_JOB_FILES = 4  # descriptors that a job has: stdin, stdout, stderr, and its program or its channel


class Warden:
    """Process that serves one host connection: it runs jobs, and reads and writes their files.

    When the connection is closed, the job, the box and this process end.
    """

    def __init__(self, channel: socket.socket, settings: dict[str, Any], box_path: str) -> None:
        """Initialize a warden.

        Args:
            channel: leads to the host.
            settings: settings of the sandbox; see `main`.
            box_path: the job's working folder, or in the namespaces tier the path where it is
                mounted.
        """
        self._channel = channel
        self._settings = settings
        self._tier: str = settings["tier"]
        self._box_path = box_path
        self._box = -1  # descriptor of the box
        self._limits: dict[str, Any] = {}  # fields of the host's RunLimits
        self._cores: list[int] = []
        self._job_number = 0  # as the host counts
        self._job_pid = 0  # 0 while no job runs
        self._job_end = -1  # pidfd, which is readable when the job has ended
        self._deadline_s = float("inf")
        self._kill_reason = ""
        self._earlier_cpu_s = 0.0  # CPU time of earlier jobs
        # Descriptor of a /proc in which this process watches the memory of the process tree; -1 if a
        # control group limits it, or if the tier is not "namespaces".
        self._watched_proc = -1

        self._commands: dict[str, Callable[..., None]] = {
            "open": self._open_box,
            "start": self._start_job,
            "interrupt": self._interrupt_job,
            "pause": self._pause_job,
            "resume": self._resume_job,
            "kill": self._kill_job,
            "put": self._put_file,
            "get": self._get_file,
            "list": self._list_files,
        }

    def run(self, proc: int, user: tuple[int, int], group_files: list[int]) -> NoReturn:
        """Set this process up, serve the host, and end this process.

        Args:
            proc: descriptor of the old /proc.
            user: user and group of the zygote.
            group_files: descriptors through which this process joins its control groups.
        """
        status = 1
        try:
            self._set_up(proc, user, group_files)
            self._serve()
        except EOFError:
            status = 0
        except BaseException as error:
            with suppress(OSError):
                wire.send(self._channel, {"fault": f"{type(error).__name__}: {error}"})
        finally:
            self._end_tree()
            if self._tier != "namespaces":
                box.remove_tree(self._box_path)
            os._exit(status)

    def _set_up(self, proc: int, user: tuple[int, int], group_files: list[int]) -> None:
        """Set up the job's namespaces and join its control groups; see `run` for the arguments.

        `proc` stays open if this process must watch the memory of the process tree itself.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
        if self._tier == "namespaces":
            jail.enter_job(proc, user)
        for file in group_files:
            os.write(file, b"0")
            os.close(file)
        if self._tier == "namespaces" and not group_files:
            self._watched_proc = proc
        else:
            os.close(proc)

    def _serve(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            if self._job_pid:
                poll.register(self._job_end, select.POLLIN)
            ready = {file for file, _ in poll.poll(self._poll_timeout_ms())}

            if self._job_pid:
                has_ended = self._job_end in ready
                if not has_ended:
                    self._kill_reason = self._exceeded_limit()
                if has_ended or self._kill_reason:
                    self._report_end()

            if self._channel.fileno() in ready:
                message, files = wire.receive(self._channel)
                command = self._commands[message.pop("do")]
                command(files, **message)

    def _poll_timeout_ms(self) -> int | None:
        """Return the milliseconds until the job's limits must be checked; None if they need no check.

        The deadline needs a check when it is reached. Limits that the kernel does not enforce (see
        `_exceeded_limit`) need one every `_CHECK_S` seconds.
        """
        if not self._job_pid:
            return None
        timeout_s = self._deadline_s - time.monotonic()
        kernel_enforces_limits = self._tier == "namespaces" and self._watched_proc < 0
        if not kernel_enforces_limits:
            timeout_s = min(timeout_s, _CHECK_S)
        if timeout_s == float("inf"):
            return None
        return max(0, int(timeout_s * 1000) + 1)  # rounded up, so that the deadline has passed

    def _exceeded_limit(self) -> str:
        """Return the limit that the job exceeds ("wall", "disk", "threads" or "memory"), or ""."""
        limits = self._limits
        if time.monotonic() >= self._deadline_s:
            return "wall"

        if self._tier != "namespaces":
            box_is_full = box.exceeds(
                self._box_path,
                max_bytes=limits["disk_mb"] << 20,
                max_files=limits["files"],
                unlinked_bytes=usage.unlinked_bytes(self._job_pid),
            )
            if box_is_full:
                return "disk"
            if usage.thread_count(self._job_pid) > limits["processes"]:
                return "threads"
        elif self._watched_proc >= 0:
            max_bytes = (limits["memory_mb"] << 20) + _SPARE_BYTES
            if usage.tree_exceeds(self._watched_proc, max_bytes):
                return "memory"
        return ""

    # --- commands of the host

    def _open_box(self, files: list[int], limits: dict[str, Any], cores: list[int]) -> None:
        """Take the limits and the cores of this warden's jobs, and enter their box.

        In the tier "namespaces", the box is mounted here.

        Args:
            files: descriptors that came with the command; this command has none.
            limits: limits of the job, as `rollout.sandbox.RunLimits` names them.
            cores: numbers of the cores that the job may use.
        """
        self._limits = limits
        self._cores = cores
        if self._tier == "namespaces":
            jail.furnish_job(limits["disk_mb"] << 20, limits["files"])
        self._box = os.open(self._box_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.chdir(self._box_path)
        # The job has the same user id, and must not look into this process.
        linux.prctl(linux.SET_DUMPABLE, 0)

    def _start_job(self, files: list[int], kind: str, job: int) -> None:
        self._job_number = job
        self._earlier_cpu_s = _children_cpu_s()
        error_read, error_write = os.pipe()
        self._job_pid = os.fork()
        if self._job_pid == 0:
            os.close(error_read)
            self._become_job(kind, files, error_write)
        os.close(error_write)
        for file in files:
            os.close(file)

        error = os.read(error_read, 4096).decode()  # returns when the job is confined
        os.close(error_read)
        if error:
            raise OSError(f"the job cannot be confined: {error}")
        self._job_end = os.pidfd_open(self._job_pid)
        self._kill_reason = ""
        self._deadline_s = float("inf")
        if kind == "program":
            self._deadline_s = time.monotonic() + self._limits["wall_s"]

    def _interrupt_job(self, files: list[int]) -> None:
        if self._job_pid:
            os.kill(self._job_pid, signal.SIGINT)

    def _pause_job(self, files: list[int]) -> None:
        """Stop all processes of the job; a process that is stopped cannot wake another one."""
        if self._job_pid:
            self._signal_tree(signal.SIGSTOP)

    def _resume_job(self, files: list[int]) -> None:
        if self._job_pid:
            self._signal_tree(signal.SIGCONT)

    def _kill_job(self, files: list[int]) -> None:
        if self._job_pid:
            self._kill_reason = "asked"
            self._report_end()

    def _put_file(self, files: list[int], name: str) -> None:
        try:
            box.put(self._box, name, files[0])
        except OSError as error:
            if self._is_machine_failure(error):
                raise
            self._send_refusal(error)
        else:
            wire.send(self._channel, {"done": True})

    def _is_machine_failure(self, error: OSError) -> bool:
        """Return True if a file could not be written because of the machine, not of the file.

        A full disk is the box's own in the namespaces tier, and the machine's in the other tiers.
        """
        if error.errno in _FULL_DISK_ERRORS:
            return self._tier != "namespaces"
        return error.errno in _MACHINE_ERRORS

    def _get_file(self, files: list[int], name: str) -> None:
        self._send_file(lambda: box.get(self._box, name))

    def _list_files(self, files: list[int]) -> None:
        self._send_file(lambda: box.listing(self._box_path))

    def _send_file(self, open_file: Callable[[], int]) -> None:
        try:
            file = open_file()
        except OSError as error:
            self._send_refusal(error)
            return
        wire.send(self._channel, {"done": True}, [file])
        os.close(file)

    def _send_refusal(self, error: OSError) -> None:
        wire.send(self._channel, {"refused": error.strerror})

    # --- the job

    def _become_job(self, kind: str, files: list[int], error_pipe: int) -> NoReturn:
        """Confine this process, and run the program or the cells in it."""
        try:
            _keep_job_files(kind, files, error_pipe)
            error_pipe = _JOB_FILES  # the number behind those of the job's files
            self._confine(kind)
            os.close(error_pipe)
        except BaseException as error:
            os.write(error_pipe, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        try:
            if kind == "program":
                program.run_main(_JOB_FILES - 1)
            else:
                program.run_cells(_JOB_FILES - 1)
        finally:
            os._exit(1)

    def _confine(self, kind: str) -> None:
        """Give up everything that the job must not have, and hide this package from it."""
        os.setsid()
        linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.SET_DUMPABLE, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(HOME=self._box_path, TMPDIR=self._box_path)
        sys.path.insert(0, self._box_path)
        sys.argv = ["main.py"]

        _set_limits(self._settings, self._limits, kind, self._cores)
        if self._tier == "landlock":
            linux.drop_capabilities()
            filters.confine_files(readable=self._settings["readable"], writable=[self._box_path])
        if self._tier != "unisolated":
            filters.install_filter(allow_processes=self._tier == "namespaces", own_pid=os.getpid())
        for name in list(sys.modules):
            if name.partition(".")[0] == __package__:
                del sys.modules[name]

    def _report_end(self) -> None:
        """End the whole process tree of the job, then report the end to the host."""
        status = self._end_tree()
        peak_rss_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        report = {
            "job": self._job_number,
            "exit": os.waitstatus_to_exitcode(status),
            "killed": self._kill_reason,
            "cpu_s": _children_cpu_s() - self._earlier_cpu_s,
            "memory_bytes": peak_rss_kib * 1024,
        }
        wire.send(self._channel, report)

    def _end_tree(self) -> int:
        """Kill and reap every process of the job; return the wait status of the first process."""
        if not self._job_pid:
            return 0
        job_status = 0
        self._signal_tree(signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                pid, status = os.wait()
                if pid == self._job_pid:
                    job_status = status
        os.close(self._job_end)
        self._job_pid = 0
        return job_status

    def _signal_tree(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self._tier == "unisolated":
                os.killpg(self._job_pid, number)
            elif self._tier == "namespaces":
                # -1 is every process of the namespace but this one, which is its first.
                os.kill(-1, number)
            else:  # in the landlock tier a job is one process
                os.kill(self._job_pid, number)


def _children_cpu_s() -> float:
    """Return the CPU time of all children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _keep_job_files(kind: str, files: list[int], error_pipe: int) -> None:
    """Close all descriptors but those of the job, and the error pipe behind them.

    The job has its standard streams, which programs that it starts inherit, and descriptor 3: the
    program, or the channel of the cells.
    """
    if kind == "program":
        source, stdin, stdout, stderr = files
        job_files = [stdin, stdout, stderr, source, error_pipe]
    else:
        null = os.open("/dev/null", os.O_RDWR)
        job_files = [null, null, null, files[0], error_pipe]

    # The files are duplicated above all targets first, since a target may be one of them.
    duplicates = [os.dup(file) for file in job_files]
    while min(duplicates) < len(job_files):
        duplicates = [os.dup(file) for file in duplicates]
    for target, file in enumerate(duplicates):
        os.dup2(file, target, inheritable=target < 3)
    os.closerange(len(job_files), _MAX_FILES)


def _set_limits(
    settings: dict[str, Any], limits: dict[str, Any], kind: str, cores: list[int]
) -> None:
    """Limit cores and resources of this process and its children, which cannot raise the limits."""
    os.sched_setaffinity(0, cores)
    soft_limits = {
        resource.RLIMIT_AS: settings["address_space"] + (limits["memory_mb"] << 20),
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if settings["tier"] == "namespaces":
        # Outside of a user namespace this limit would count all processes of the user. The warden
        # is one process more.
        soft_limits[resource.RLIMIT_NPROC] = limits["processes"] + 1
    if kind == "program":  # each cell of a session has a limit on its wall time instead
        soft_limits[resource.RLIMIT_CPU] = limits["cpu_s"]

    for limit, soft in soft_limits.items():
        # One second more of CPU time lets SIGXCPU come before SIGKILL.
        hard = soft + 1 if limit == resource.RLIMIT_CPU else soft
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft = min(soft, ceiling)
            hard = min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def main() -> None:
    """Run the zygote, which serves the host and is cloned for every warden.

    The zygote is inside of the isolation, and has imported the modules of this package. It never
    sees a program, its input or its output: these are open files that go directly to the job, so
    that no job finds traces of another one in the memory that it inherits.

    The first command line argument is the descriptor of the host's channel. The second one has the
    settings as JSON: `tier`, `parent` (process id of the host), `readable` (paths) and `packages`
    (folders).
    """
    host = socket.socket(fileno=int(sys.argv[1]))
    settings: dict[str, Any] = json.loads(sys.argv[2])
    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:  # the host has ended before the line above
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

    mapped_pages = int(usage.read_proc(proc, "self/statm").split()[0])
    # Bytes of the address space that every job has at its start.
    settings["address_space"] = mapped_pages * usage.PAGE_BYTES
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps wardens
    wire.send(host, {"ready": True})
    _clone_wardens(host, settings, proc)


def _clone_wardens(host: socket.socket, settings: dict[str, Any], proc: int) -> None:
    """Clone a warden for each request of the host, until the host closes its channel."""
    has_namespaces = settings["tier"] == "namespaces"
    user = (os.geteuid(), os.getegid())
    while True:
        try:
            request, (channel, *group_files) = wire.receive(host)
        except EOFError:
            return
        pid = linux.clone(jail.JOB_NAMESPACES) if has_namespaces else os.fork()
        if pid == 0:
            host.close()
            box_path = request.get("box", jail.BOX)
            warden = Warden(socket.socket(fileno=channel), settings, box_path)
            warden.run(proc, user, group_files)
        for file in (channel, *group_files):
            os.close(file)
