"""Namespaces: a root with an interpreter and nothing else, no network, no other processes."""

import os
import signal
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import PurePosixPath

from . import linux

NOBODY = 65534
BOX = "/box"  # the job's working folder, which is also its /tmp and /dev/shm
JOB_NAMESPACES = linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWIPC

_JOB_USER = 1000  # user and group as which the program sees itself
# The new root is built here, covered by the mount, in a mount namespace of this process.
_STAGE = "/tmp"  # noqa: S108
_LINKS = {
    "tmp": BOX[1:],
    "dev/shm": f"..{BOX}",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
}
_NO_DEVICES = linux.NOSUID | linux.NODEV
_NO_PROGRAMS = linux.NOSUID | linux.NODEV | linux.NOEXEC


def enter(readable: Iterable[str]) -> int:
    """Fork into new namespaces whose root has only the paths `readable`; return in the child.

    The child has no privileges. The parent waits for the child and ends with it.

    Returns:
        Descriptor of the old /proc, through which a process describes itself to the kernel.

    Raises:
        OSError: the machine does not allow it.
    """
    is_root = os.geteuid() == 0
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    user = (os.geteuid(), os.getegid())
    namespaces = (
        linux.NEWNS | linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
    )
    if is_root:
        linux.unshare(namespaces)
    else:
        linux.unshare(namespaces | linux.NEWUSER)
        _map_user(proc, user, user)

    child = os.fork()
    if child:
        os.closerange(3, 256)
        os.waitpid(child, 0)
        os._exit(0)

    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)
    linux.mount("none", "/", "", linux.REC | linux.PRIVATE)
    _build_root(list(readable))
    if is_root:
        _become_nobody()
    linux.drop_capabilities()
    return proc


def enter_job(proc: int, outside: tuple[int, int]) -> None:
    """Set up the namespaces `JOB_NAMESPACES` into which this process was cloned.

    Args:
        proc: descriptor of the old /proc.
        outside: user and group of this process in the namespace around.
    """
    _map_user(proc, (_JOB_USER, _JOB_USER), outside)
    # When the machine runs out of memory, the kernel kills jobs first.
    _write_proc(proc, "self/oom_score_adj", "1000")


def furnish_job(disk_bytes: int, files: int) -> None:
    """Mount the job's empty box, then give up all privileges.

    Args:
        disk_bytes: size of the box.
        files: number of files and folders that it can hold.
    """
    options = f"size={disk_bytes},nr_inodes={files + 1},mode=0700"
    linux.mount("box", BOX, "tmpfs", _NO_DEVICES, options)
    try:
        linux.mount("proc", "/proc", "proc", _NO_PROGRAMS, "subset=pid")
    except PermissionError:  # in a container that covers parts of /proc, jobs have an empty /proc
        linux.mount("none", "/proc", "tmpfs", linux.RDONLY | _NO_PROGRAMS, "size=4k")
    linux.drop_capabilities()


def _become_nobody() -> None:
    """Give up root's user, so that root's files cannot be read and the limit on processes holds."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.prctl(linux.SET_DUMPABLE, 1)
    linux.prctl(linux.SET_PDEATHSIG, signal.SIGKILL)  # the change of the user has cleared it


def _map_user(proc: int, inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """Map user and group of this process's new user namespace to those of the namespace around."""
    _write_proc(proc, "self/setgroups", "deny")
    _write_proc(proc, "self/uid_map", f"{inside[0]} {outside[0]} 1")
    _write_proc(proc, "self/gid_map", f"{inside[1]} {outside[1]} 1")


def _build_root(readable: list[str]) -> None:
    """Build a read-only root file system with the paths `readable`, and change into it."""
    # The paths are opened first, because the new root covers some of them.
    descriptors = {
        path: os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        for path in sorted(readable)
        if os.path.lexists(path)
    }
    linux.mount("root", _STAGE, "tmpfs", _NO_DEVICES, "size=1m,mode=0755")
    os.umask(0o022)
    for folder in ("dev", "proc", BOX[1:]):
        os.mkdir(f"{_STAGE}/{folder}")
    for path, descriptor in descriptors.items():
        _show(descriptor, PurePosixPath(f"{_STAGE}{path}"))
        os.close(descriptor)
    with suppress(PermissionError):  # in a container that covers parts of /proc, it stays empty
        linux.mount("proc", f"{_STAGE}/proc", "proc", _NO_PROGRAMS)
    for name, target in _LINKS.items():
        link = f"{_STAGE}/{name}"
        if not os.path.lexists(link):  # /tmp is a folder already if an interpreter lies below it
            os.symlink(target, link)

    os.chdir(_STAGE)
    linux.call("pivot_root", b".", b".")  # mounts the old root on top of the new one
    linux.detach(".")  # unmounts the old root
    os.chdir("/")
    linux.mount("none", "/", "", linux.BIND | linux.REMOUNT | linux.RDONLY | _NO_DEVICES)


def _show(descriptor: int, target: PurePosixPath) -> None:
    """Show a file, folder or link of the old root at `target` in the new one, read-only."""
    if os.path.lexists(target):
        return
    os.makedirs(target.parent, exist_ok=True)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink("", dir_fd=descriptor), target)
        return
    if stat.S_ISDIR(mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(f"/proc/self/fd/{descriptor}", str(target), "", linux.BIND | linux.REC)
    linux.mount_read_only(str(target))


def _write_proc(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
