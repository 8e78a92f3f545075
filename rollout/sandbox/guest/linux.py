"""Linux system calls that Python's library lacks, on x86_64."""

import ctypes
import os
import signal
import struct

CALLS = {  # asm/unistd_64.h
    "clone": 56,
    "openat2": 437,
    "pivot_root": 155,
    "capset": 126,
    "mount": 165,
    "umount2": 166,
    "unshare": 272,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
# linux/sched.h
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
# sys/mount.h
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, DETACH = (
    1,
    2,
    4,
    8,
    0x20,
    0x1000,
    0x4000,
    0x40000,
    2,
)
# linux/prctl.h
SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, CAPBSET_DROP, SET_NO_NEW_PRIVS, CAP_AMBIENT = (
    1,
    4,
    22,
    24,
    38,
    47,
)
_CAPABILITIES = 41  # CAP_CHECKPOINT_RESTORE is the last; a kernel that knows fewer refuses the rest
_AMBIENT_CLEAR_ALL = 4
_RESOLVE_INSIDE = (
    0x01 | 0x02 | 0x04 | 0x08
)  # no other mount, no magic link, no link, nothing above the folder
_libc = ctypes.CDLL(None, use_errno=True)


def call(
    name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None, on: str = ""
) -> int:
    """The system call `name`; OSError, which says it and `on` what, if the kernel refused it."""
    plain = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    return _done(int(_libc.syscall(ctypes.c_long(CALLS[name]), *plain)), f"{name} {on}".strip())


def prctl(option: int, *arguments: int) -> None:
    """Set one of this process's properties; on other processors too, where its number is another."""
    four = map(ctypes.c_ulong, [*arguments, 0, 0, 0, 0][:4])
    _done(int(_libc.prctl(ctypes.c_int(option), *four)), f"prctl {option}")


def _done(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    call("unshare", flags, on=f"{flags:#x}")


def clone(flags: int) -> int:
    """Fork into the new namespaces of `flags`; 0 in the child, its id in the parent.

    Python's own bookkeeping after a fork does not run in the child: it must be single-threaded, and it may fork again.
    """
    return call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    names = [text.encode() for text in (source, target, kind)]
    call("mount", *names, flags, options.encode() or None, on=f"{kind or 'bind'} on {target}")


def detach(target: str) -> None:
    """Unmount `target`, lazily."""
    call("umount2", target.encode(), DETACH, on=target)


def mount_read_only(path: str) -> None:
    """Make the mount at `path` and all below it read-only, without set-user-id programs."""
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", RDONLY | NOSUID, 0, 0, 0))
    at_cwd, recursive = 2**64 - 100, 0x8000
    call("mount_setattr", at_cwd, path.encode(), recursive, attributes, len(attributes) - 1)


def open_inside(folder: int, name: str, flags: int, mode: int = 0) -> int:
    """A descriptor of the path `name` below the open `folder`, refusing every link and every way out of it."""
    how = ctypes.create_string_buffer(
        struct.pack("=QQQ", flags | os.O_CLOEXEC | os.O_NONBLOCK, mode, _RESOLVE_INSIDE)
    )
    return call("openat2", folder, os.fsencode(name), how, len(how) - 1)


def drop_capabilities() -> None:
    """Give up every privilege for good, also for what is executed later."""
    for capability in range(_CAPABILITIES):
        try:
            prctl(CAPBSET_DROP, capability)
        except OSError:  # without CAP_SETPCAP there is nothing to drop, and no new privileges come
            break
    prctl(CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    call("capset", header, ctypes.create_string_buffer(24))
    prctl(SET_NO_NEW_PRIVS, 1)
