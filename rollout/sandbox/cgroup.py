"""Control groups (cgroups): limits on the memory and the processes of a job's whole process tree.

They are used where this user may create control groups; see `writable_parents`.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "mcore-sandbox-"
_ROOT = Path("/sys/fs/cgroup")
_SPARE_BYTES = 48 << 20  # for the warden, and for output that nobody has read yet
_WARDEN_PROCESSES = 2  # in the group besides the program's own
_REMOVAL_S = 2.0


class Cgroup:
    """One control group, of version 1 or 2, which one job after another uses."""

    def __init__(self, folders: dict[str, Path]) -> None:
        """Create the group.

        Args:
            folders: its folder by controller, "memory" and "pids"; one and the same in version 2.
        """
        self._folders = folders
        self._limits: tuple[int, int] | None = None  # bytes and processes that are set
        for folder in set(folders.values()):
            folder.mkdir()
        self._oom_kills_seen = self.oom_kills()

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Limit the process tree of the next job."""
        limits = (memory_bytes + _SPARE_BYTES, processes + _WARDEN_PROCESSES)
        if limits == self._limits:
            return
        memory_limit, process_limit = limits
        self._memory_file("memory.max", "memory.limit_in_bytes").write_text(str(memory_limit))
        (self._folders["pids"] / "pids.max").write_text(str(process_limit))
        if self._is_version_2:
            with suppress(OSError):  # the file is absent without swap accounting
                (self._folders["memory"] / "memory.swap.max").write_text("0")
        self._limits = limits

    def open_process_files(self) -> list[int]:
        """Return open `cgroup.procs` files; a process that writes `0` to each joins the group."""
        return [
            os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            for folder in set(self._folders.values())
        ]

    def oom_kills(self) -> int:
        """Return the number of processes of the group that the kernel has killed for memory."""
        try:
            events = self._memory_file("memory.events", "memory.oom_control").read_text()
        except FileNotFoundError:  # the group was removed with its pool
            return 0
        for line in events.splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def has_new_oom_kills(self) -> bool:
        """Return True if the kernel has killed a process for memory since the previous call."""
        kills = self.oom_kills()
        has_new = kills > self._oom_kills_seen
        self._oom_kills_seen = kills
        return has_new

    def is_empty(self) -> bool:
        """Return True if the group has no process."""
        return not any((folder / "cgroup.procs").read_text() for folder in self._folders.values())

    def remove(self) -> None:
        """Kill the processes of the group and remove it."""
        for folder in set(self._folders.values()):
            _remove(folder)

    @property
    def _is_version_2(self) -> bool:
        return self._folders["memory"] == self._folders["pids"]

    def _memory_file(self, version_2_name: str, version_1_name: str) -> Path:
        name = version_2_name if self._is_version_2 else version_1_name
        return self._folders["memory"] / name


class Cgroups:
    """Control groups of one sandbox, created on demand and used again.

    Attributes:
        groups: all groups that exist.
    """

    def __init__(self, parents: dict[str, Path]) -> None:
        """Remove the groups that killed processes have left.

        Args:
            parents: folder in which groups are created, by controller; see `writable_parents`.
        """
        self.groups: list[Cgroup] = []
        self._parents = parents
        self._free: list[Cgroup] = []
        for parent in set(parents.values()):
            for folder in abandoned_folders(parent):
                _remove(folder)
        self._name_prefix = f"{process_prefix()}{id(self):x}"

    def lend(self) -> Cgroup:
        """Return a group without processes."""
        for group in self._free:
            if group.is_empty():
                self._free.remove(group)
                group.has_new_oom_kills()  # forgets the kills of earlier jobs
                return group
        name = f"{self._name_prefix}-{len(self.groups)}"
        folders = {controller: parent / name for controller, parent in self._parents.items()}
        group = Cgroup(folders)
        self.groups.append(group)
        return group

    def take_back(self, group: Cgroup) -> None:
        """Accept a lent group whose job has ended or is about to; ignore groups of closed pools."""
        if group in self.groups:
            self._free.append(group)

    def close(self) -> None:
        """Remove all groups."""
        for group in self.groups:
            group.remove()
        self.groups.clear()
        self._free.clear()


def writable_parents() -> dict[str, Path] | None:
    """Return the nearest folders in which this process may create limited groups, by controller.

    Returns:
        Folders of the controllers "memory" and "pids"; None if there are none.
    """
    paths: dict[str, str] = {}  # this process's group by controller; "" is the key in version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path

    memory: Path | None
    pids: Path | None
    if "memory" in paths and "pids" in paths:
        memory = _nearest_writable(_ROOT / "memory", paths["memory"], "memory.limit_in_bytes")
        pids = _nearest_writable(_ROOT / "pids", paths["pids"], "pids.max")
    elif "" in paths:
        memory = _nearest_writable(_ROOT, paths[""], "memory.max", "pids.max")
        pids = memory
    else:
        return None
    if memory is None or pids is None:
        return None
    return {"memory": memory, "pids": pids}


def abandoned_folders(parent: Path) -> Iterator[Path]:
    """Yield the folders that processes have left in `parent` when they were killed.

    Their names begin with `process_prefix` of these processes.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        pid, _, rest = folder.name.removeprefix(PREFIX).partition("-")
        start = rest.partition("-")[0]
        if pid.isdecimal() and start_ticks(int(pid)) != start:
            yield folder


def process_prefix() -> str:
    """Return the beginning of the names of this process's folders: its id and its start time.

    The kernel reuses process ids, but not together with the start time.
    """
    pid = os.getpid()
    return f"{PREFIX}{pid}-{start_ticks(pid)}-"


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, or "" if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = status.rpartition(")")[2].split()  # the program's name in parentheses may have spaces
    return fields[19]


def _nearest_writable(root: Path, path: str, *limit_files: str) -> Path | None:
    """Return the nearest folder, at or above a group, in which limited groups can be created."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return None
        probe = folder / f"{process_prefix()}probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        is_writable = all(os.access(probe / file, os.W_OK) for file in limit_files)
        with suppress(OSError):
            probe.rmdir()
        if is_writable:
            return folder
    return None


def _remove(folder: Path) -> None:
    """Kill the processes of a group and remove its folder; give up after _REMOVAL_S seconds."""
    deadline = time.monotonic() + _REMOVAL_S
    while time.monotonic() < deadline:
        try:
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            # The group is busy until its last process and page are gone. If it outlasts the
            # deadline, a sandbox that starts after this process has ended removes it.
            time.sleep(0.005)
