"""Namespaces: a root file system that holds an interpreter and nothing else, no network, no other processes."""

import os
import signal
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import PurePosixPath

from . import linux

NOBODY = 65534
BOX = "/box"  # the job's own folder, also its /tmp and /dev/shm
_INSIDE = 1000  # who the program sees itself as
_LINKS = {
    "tmp": BOX[1:],
    "dev/shm": f"..{BOX}",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
}
_STAGE = "/tmp"  # noqa: S108  (covered by the new root while it is built, in a mount namespace of our own)


def enter(readable: Iterable[str]) -> int:
    """Fork into new namespaces whose root holds only `readable`, without any privilege; returns in the child.

    The parent waits for the child and ends with it.

    Returns:
        A descriptor of the old /proc, for what a process must write about itself.

    Raises:
        OSError: the machine does not allow it.
    """
    root, proc = os.geteuid() == 0, os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    user = (os.geteuid(), os.getegid())
    spaces = (
        linux.NEWNS | linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
    )
    linux.unshare(spaces if root else spaces | linux.NEWUSER)
    if not root:
        map_user(proc, user, user)
    child = os.fork()
    if child:
        os.closerange(3, 256)
        os.waitpid(child, 0)
        os._exit(0)
    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
    linux.mount("none", "/", "", linux.REC | linux.PRIVATE)
    _build_root(list(readable))
    if root:  # files that only root may read stay unreadable, and the limit on processes counts
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        linux.prctl(linux.SET_DUMPABLE, 1)
        linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    linux.drop_capabilities()
    return proc


def map_user(proc: int, inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Say who this process is in its new user namespace: (user, group) `inside` is `outside` in the one around it."""
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{inside[0]} {outside[0]} 1")
    _write(proc, "self/gid_map", f"{inside[1]} {outside[1]} 1")


JOB_NAMESPACES = linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWIPC


def enter_job(proc: int, outside: tuple[int, int]) -> None:
    """Settle in the namespaces that this process was cloned into with JOB_NAMESPACES, as a user of its own."""
    map_user(proc, (_INSIDE, _INSIDE), outside)
    _write(proc, "self/oom_score_adj", "1000")  # out of memory: a job goes first


def furnish_job(disk_bytes: int, files: int) -> None:
    """Mount the job's empty box, of this size and with room for so many files; then give up every privilege."""
    options = f"size={disk_bytes},nr_inodes={files + 1},mode=0700"
    linux.mount("box", BOX, "tmpfs", linux.NOSUID | linux.NODEV, options)
    try:
        linux.mount(
            "proc", "/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC, "subset=pid"
        )
    except PermissionError:  # a container has covered parts of /proc: the job does without
        linux.mount(
            "none",
            "/proc",
            "tmpfs",
            linux.RDONLY | linux.NOSUID | linux.NODEV | linux.NOEXEC,
            "size=4k",
        )
    linux.drop_capabilities()


def _build_root(readable: list[str]) -> None:
    held = {  # before the new root covers them
        path: os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        for path in sorted(readable)
        if os.path.lexists(path)
    }
    linux.mount("root", _STAGE, "tmpfs", linux.NOSUID | linux.NODEV, "size=1m,mode=0755")
    os.umask(0o022)
    for folder in ("dev", "proc", BOX[1:]):
        os.mkdir(f"{_STAGE}/{folder}")
    for path, handle in held.items():
        _show(handle, PurePosixPath(f"{_STAGE}{path}"))
        os.close(handle)
    with suppress(PermissionError):  # a container has covered parts of /proc: jobs do without
        linux.mount("proc", f"{_STAGE}/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
    for name, target in _LINKS.items():
        if not os.path.lexists(
            f"{_STAGE}/{name}"
        ):  # /tmp is a folder where an interpreter lives below it
            os.symlink(target, f"{_STAGE}/{name}")
    os.chdir(_STAGE)
    linux.call("pivot_root", b".", b".")
    linux.detach(".")
    os.chdir("/")
    linux.mount(
        "none", "/", "", linux.BIND | linux.REMOUNT | linux.RDONLY | linux.NOSUID | linux.NODEV
    )


def _show(handle: int, place: PurePosixPath) -> None:
    """Show something of the old root at a place in the new one, read-only."""
    if os.path.lexists(place):
        return
    os.makedirs(place.parent, exist_ok=True)
    kind = os.fstat(handle).st_mode
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink("", dir_fd=handle), place)
        return
    if stat.S_ISDIR(kind):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(f"/proc/self/fd/{handle}", str(place), "", linux.BIND | linux.REC)
    linux.mount_read_only(str(place))


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
