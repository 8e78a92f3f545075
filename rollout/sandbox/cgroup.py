"""Control groups (cgroups): limits on the memory and processes of a job's whole tree, where this user may set them."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "mcore-sandbox-"
_ROOT = Path("/sys/fs/cgroup")
_SPARE_BYTES = 48 << 20  # of the warden and of output that is still to be read
_WARDENS = 2  # processes beside the program's own
_REMOVAL_S = 2.0


class Cgroup:
    """One group, version 1 or 2, used by one job after another."""

    def __init__(self, folders: dict[str, Path]) -> None:
        """`folders` by controller, `memory` and `pids`; they are made."""
        self._folders = folders
        self._set: tuple[int, int] | None = None
        for folder in set(folders.values()):
            folder.mkdir()
        self._kills = self._count_kills()

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set what the next job's tree may use together."""
        wanted = (memory_bytes + _SPARE_BYTES, processes + _WARDENS)
        if wanted != self._set:
            (
                self._folders["memory"] / self._file("memory.max", "memory.limit_in_bytes")
            ).write_text(str(wanted[0]))
            (self._folders["pids"] / "pids.max").write_text(str(wanted[1]))
            if self._unified:
                with suppress(OSError):  # absent without swap accounting
                    (self._folders["memory"] / "memory.swap.max").write_text("0")
            self._set = wanted

    def open(self) -> list[int]:
        """Descriptors through which a process joins by writing `0`."""
        return [
            os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            for folder in set(self._folders.values())
        ]

    def ran_out(self) -> bool:
        """Whether the kernel killed a process of the group for memory since the last time this was asked."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills > before

    def empty(self) -> bool:
        """Whether no process is left in it."""
        return not any((folder / "cgroup.procs").read_text() for folder in self._folders.values())

    def remove(self) -> None:
        """Kill what is in it and remove it."""
        for folder in set(self._folders.values()):
            _remove(folder)

    @property
    def _unified(self) -> bool:
        return self._folders["memory"] == self._folders["pids"]

    def _file(self, unified: str, legacy: str) -> str:
        return unified if self._unified else legacy

    def _count_kills(self) -> int:
        try:
            text = (
                self._folders["memory"] / self._file("memory.events", "memory.oom_control")
            ).read_text()
        except FileNotFoundError:  # removed with its pool
            return 0
        return next(
            (int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0
        )


class Cgroups:
    """The groups of one sandbox: made when they are needed, lent, used again."""

    def __init__(self, parents: dict[str, Path]) -> None:
        """`parents`: the folder by controller under which groups can be made; see `writable_parents`.

        Groups that a killed process left there are removed.
        """
        self._parents = parents
        self._free: list[Cgroup] = []
        self._all: list[Cgroup] = []
        for folder in (left for parent in set(parents.values()) for left in abandoned(parent)):
            _remove(folder)
        self._owner = f"{PREFIX}{os.getpid()}-{started(os.getpid())}-{id(self):x}"

    def lend(self) -> Cgroup:
        """A group without processes."""
        for group in self._free:
            if group.empty():
                self._free.remove(group)
                group.ran_out()  # forget what happened to earlier jobs
                return group
        name = f"{self._owner}-{len(self._all)}"
        group = Cgroup({controller: parent / name for controller, parent in self._parents.items()})
        self._all.append(group)
        return group

    def take_back(self, group: Cgroup) -> None:
        """A lent group whose job has ended or is about to; one of an earlier pool is not kept."""
        if group in self._all:
            self._free.append(group)

    def close(self) -> None:
        """Remove all groups."""
        for group in self._all:
            group.remove()
        self._all, self._free = [], []


def writable_parents() -> dict[str, Path] | None:
    """The folder by controller where this process may make groups with limits, nearest first; None without one."""
    own: dict[str, str] = {}  # path by controller; of "" that of all in version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    if {"memory", "pids"} <= own.keys():
        memory = _nearest(_ROOT / "memory", own["memory"], "memory.limit_in_bytes")
        pids = _nearest(_ROOT / "pids", own["pids"], "pids.max")
    else:
        memory = pids = _nearest(_ROOT, own[""], "memory.max", "pids.max") if "" in own else None
    return {"memory": memory, "pids": pids} if memory and pids else None


def abandoned(parent: Path) -> Iterator[Path]:
    """The folders in `parent` that a killed process left: their names are the prefix, its id, its start, ..."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid, _, rest = folder.name.removeprefix(PREFIX).partition("-")
        if pid.isdecimal() and started(int(pid)) != rest.partition("-")[0]:
            yield folder


def started(pid: int) -> str:
    """When a process started, in clock ticks since boot: with its id, a name that is used once. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _nearest(root: Path, path: str, *files: str) -> Path | None:
    own = root / path.strip("/")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(root):
            return None
        probe = folder / f"{PREFIX}{os.getpid()}-{started(os.getpid())}-probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = all(os.access(probe / file, os.W_OK) for file in files)
        with suppress(OSError):
            probe.rmdir()
        if usable:
            return folder
    return None


def _remove(folder: Path) -> None:
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
        except (
            OSError
        ):  # busy until the last page and process are gone; what stays, the next start sweeps
            time.sleep(0.005)
