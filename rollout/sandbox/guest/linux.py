"""Linux system calls that Python's standard library lacks, on x86_64."""

import ctypes
import os
import signal
import struct

# asm/unistd_64.h
CALLS = {
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

# linux/sched.h: flags of clone and unshare
NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000

# sys/mount.h: flags of mount and umount2
RDONLY = 1
NOSUID = 2
NODEV = 4
NOEXEC = 8
REMOUNT = 0x20
BIND = 0x1000
REC = 0x4000
PRIVATE = 0x40000
DETACH = 2

# linux/prctl.h
SET_PDEATHSIG = 1
SET_DUMPABLE = 4
SET_SECCOMP = 22
CAPBSET_DROP = 24
SET_NO_NEW_PRIVS = 38
CAP_AMBIENT = 47

_AMBIENT_CLEAR_ALL = 4
_CAPABILITIES = 41  # CAP_CHECKPOINT_RESTORE is the last; a kernel that knows fewer refuses the rest
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD = 2**64 - 100  # -100 as an unsigned long
_AT_RECURSIVE = 0x8000

# linux/openat2.h: no other mount, no magic link, no symbolic link, nothing above the folder
_RESOLVE_INSIDE = 0x01 | 0x02 | 0x04 | 0x08

_libc = ctypes.CDLL(None, use_errno=True)


def call(
    name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None, on: str = ""
) -> int:
    """Make a system call and return its result.

    Args:
        name: name of the system call, a key of `CALLS`.
        on: object of the call, for the message of an error.

    Raises:
        OSError: the kernel refused the call.
    """
    c_arguments = [
        ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        for argument in arguments
    ]
    result = int(_libc.syscall(ctypes.c_long(CALLS[name]), *c_arguments))
    return _checked(result, f"{name} {on}".strip())


def prctl(option: int, *arguments: int) -> None:
    """Set a property of this process with the C library's `prctl`."""
    four_arguments = [*arguments, 0, 0, 0, 0][:4]
    result = int(_libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, four_arguments)))
    _checked(result, f"prctl {option}")


def _checked(result: int, call_name: str) -> int:
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{call_name}: {os.strerror(error_number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the kinds in `flags`."""
    call("unshare", flags, on=f"{flags:#x}")


def clone(flags: int) -> int:
    """Fork into new namespaces of these flags; return 0 in the child, and its id in the parent.

    Python's own handlers for forks do not run in the child. The process must be single-threaded;
    the child may fork again.
    """
    return call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system (mount(2))."""
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode(),
        flags,
        options.encode() or None,
        on=f"{kind or 'bind'} on {target}",
    )


def detach(target: str) -> None:
    """Unmount `target` as soon as it is not in use."""
    call("umount2", target.encode(), DETACH, on=target)


def mount_read_only(path: str) -> None:
    """Make the mount at `path` and all mounts below it read-only, without set-user-id programs."""
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", RDONLY | NOSUID, 0, 0, 0))
    size = len(attributes) - 1  # without the final zero of the buffer
    call("mount_setattr", _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, size)


def open_inside(folder: int, name: str, flags: int, mode: int = 0) -> int:
    """Open a path below an open folder; refuse all links and paths that leave the folder."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags, mode, _RESOLVE_INSIDE))
    return call("openat2", folder, os.fsencode(name), how, len(how) - 1)


def drop_capabilities() -> None:
    """Give up all privileges of this process, and of programs that it executes, for good."""
    for capability in range(_CAPABILITIES):
        try:
            prctl(CAPBSET_DROP, capability)
        except OSError:
            # Without CAP_SETPCAP nothing can be dropped, and no new privileges can be gained.
            break
    prctl(CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    no_capabilities = ctypes.create_string_buffer(24)
    call("capset", header, no_capabilities)
    prctl(SET_NO_NEW_PRIVS, 1)
