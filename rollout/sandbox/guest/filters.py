"""Landlock and seccomp filters: the files that a process may open and the system calls that it may make, for good."""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable

from . import linux

# linux/landlock.h
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_CHARACTER_DEVICE, _BLOCK_DEVICE, _DEVICE_IOCTL = 1 << 6, 1 << 11, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_IOCTL
_LEAST_VERSION = 3  # the first with a right to truncate
_FILE_SYSTEM_RIGHTS = {3: 15, 4: 15}  # ABI version -> how many there are; 16 from version 5 on
_BIND_TCP, _CONNECT_TCP, _ABSTRACT_SOCKETS, _SIGNALS = 1, 2, 1, 2
_ASK_VERSION, _BENEATH, _PORT = 1, 1, 2
_CALLING_VERSION = 6  # the first with rights to TCP ports, signals and sockets without files


def can_confine() -> bool:
    """Whether this machine's kernel can do what `confine_program` asks of it."""
    try:
        return platform.machine() == "x86_64" and _version() >= _CALLING_VERSION
    except (OSError, AttributeError):
        return False


def confine_program(*, readable: Iterable[str], writable: Iterable[str], port: int) -> None:
    """Confine this process and what it executes for good: these files, no network but a TCP port, no other process."""
    confine_files(readable=readable, writable=writable, port=port)
    linux.drop_capabilities()
    install_filter(processes=True, own_pid=0, connects=True)


def _version() -> int:
    return linux.call("landlock_create_ruleset", None, 0, _ASK_VERSION)


def confine_files(*, readable: Iterable[str], writable: Iterable[str], port: int = 0) -> None:
    """Let this process and its children open only what is at or below these paths, and no device but /dev/null.

    Args:
        port: the TCP port that they may connect to; 0, none.

    Raises:
        OSError: the kernel has no Landlock, or one that lets files outside be truncated.
    """
    abi = _version()
    if abi < _LEAST_VERSION:
        raise OSError(
            errno.ENOSYS,
            f"Landlock is version {abi}; version {_LEAST_VERSION} (Linux 6.2) refuses to truncate files",
        )
    rights = (1 << _FILE_SYSTEM_RIGHTS.get(abi, 16)) - 1
    ports = _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0
    scopes = _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, ports, scopes))
    rules = linux.call("landlock_create_ruleset", attributes, size, 0)
    everything = rights & ~(_EXECUTE | _CHARACTER_DEVICE | _BLOCK_DEVICE | _DEVICE_IOCTL)
    for path in readable:
        _open_below(rules, path, _EXECUTE | _READ | _LIST)
    for path in writable:
        _open_below(rules, path, everything)
    _open_below(rules, "/dev/null", _READ | _WRITE)
    if port:
        rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT_TCP, port))
        linux.call("landlock_add_rule", rules, _PORT, rule, 0)
    linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
    linux.call("landlock_restrict_self", rules, 0)
    os.close(rules)


def _open_below(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _FILE_RIGHTS
        linux.call(
            "landlock_add_rule",
            rules,
            _BENEATH,
            ctypes.create_string_buffer(struct.pack("=Qi", rights, place)),
            0,
        )
    finally:
        os.close(place)


# asm/unistd_64.h. What Python, its standard library and numerical packages need; no sockets but pairs, no tracing,
# mounting, keys, BPF, io_uring, shared memory segments, priorities, affinity or clocks to set, nor timers that send a
# signal of the program's choice, by which one that is stopped could wake.
with open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "system_calls.txt"), encoding="ascii"
) as _table:
    _ALLOWED = _table.read()
# Landlock does not see these, so without a root of its own a program could lock its user out of his files.
_ATTRIBUTES = (
    "chmod=90 fchmod=91 utime=132 utimes=235 futimesat=261 fchmodat=268 utimensat=280 fchmodat2=452"
)
_PROCESSES = "fork=57 vfork=58 execve=59 kill=62 tkill=200 tgkill=234"
_CONNECTIONS, _SESSIONS = "connect=42 setsockopt=54 getsockopt=55", "setpgid=109 setsid=112"
_SOCKET, _SOCKETPAIR, _CLONE, _IOCTL, _FCNTL, _PRCTL, _PRLIMIT, _CLONE3 = (
    41,
    53,
    56,
    16,
    72,
    157,
    302,
    435,
)
_KILL, _TGKILL = 62, 234
_SENDS, _FAST_OPEN = (
    ((44, 3), (46, 2)),
    0x20000000,
)  # sendto, sendmsg and where their flags are; it would connect too
_FIRST_RECENT = (
    424  # newer calls are refused as unknown, and libraries then fall back to older ones
)
_TERMINAL_QUERIES = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO*CLEX
_OWNER_COMMANDS = (
    8,
    10,
    15,
)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals sent by the kernel in our name
_HARMLESS_PRCTL = (3, 15, 16, 0x53564D41)  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_NAMESPACES = 0x7E020080  # every CLONE_NEW*
_THREAD = 0x00010000  # CLONE_THREAD
_UNIX, _INTERNET, _STREAM = 1, 2, 1

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x54, 0x06
_ERROR, _KILL_PROCESS = 0x00050000, 0x80000000
_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_SET_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)


def install_filter(*, processes: bool, own_pid: int, connects: bool = False) -> None:
    """Confine this process for good.

    Args:
        processes: it may start others, signal them and change file attributes: it has a process namespace and a root
            file system of its own. Else it may have threads and signal itself, and changing attributes does nothing.
        own_pid: its id.
        connects: it may open TCP connections, stays in its process group, and changing attributes does nothing.
    """
    code = b"".join(
        struct.pack("=HBBI", *instruction) for instruction in rules(processes, own_pid, connects)
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    )
    linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
    linux.prctl(linux.SET_SECCOMP, _SET_MODE_FILTER, ctypes.addressof(program))


def rules(processes: bool, own_pid: int, connects: bool = False) -> list[Instruction]:
    """The filter's program; see `install`."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, 0),  # the call's number
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    code += _only_if(_SOCKETPAIR, _if_stream(_UNIX))
    if connects:
        code += _only_if(_SOCKET, _if_stream(_INTERNET))
        for number, flags in _SENDS:
            code += _only_if(
                number, [*_argument(flags), (_ANY_BIT, 0, 1, _FAST_OPEN), _refuse(), _ALLOW]
            )
    code += _only_if(_IOCTL, _if_argument(1, _TERMINAL_QUERIES, _ALLOW, _refuse(errno.ENOTTY)))
    code += _only_if(_FCNTL, _if_argument(1, _OWNER_COMMANDS, _refuse(), _ALLOW))
    code += _only_if(_PRCTL, _if_argument(0, _HARMLESS_PRCTL, _ALLOW, _refuse()))
    code += _only_if(_PRLIMIT, _if_argument(0, (0,), _ALLOW, _refuse()))
    code += _only_if(
        _CLONE3, [_refuse(errno.ENOSYS)]
    )  # its flags are out of sight; libc falls back to clone
    allowed = _numbers(_ALLOWED)
    if processes:
        code += _only_if(_CLONE, [*_argument(0), (_ANY_BIT, 0, 1, _NAMESPACES), _refuse(), _ALLOW])
        allowed += _numbers(_PROCESSES) + _numbers(_CONNECTIONS if connects else _ATTRIBUTES)
    else:
        code += _only_if(_CLONE, [*_argument(0), (_ANY_BIT, 1, 0, _THREAD), _refuse(), _ALLOW])
        for number in (_KILL, _TGKILL):
            code += _only_if(number, _if_argument(0, (own_pid,), _ALLOW, _refuse()))
    if connects or not processes:
        for number in _numbers(_ATTRIBUTES):
            code += _only_if(number, [_refuse(0)])
    for first, last in _runs(sorted(set(allowed) - set(_numbers(_SESSIONS) if connects else ()))):
        code += [(_AT_LEAST, 0, 2, first), (_ABOVE, 1, 0, last), _ALLOW]
    return [*code, (_AT_LEAST, 0, 1, _FIRST_RECENT), _refuse(errno.ENOSYS), _refuse()]


def _only_if(number: int, body: list[Instruction]) -> list[Instruction]:
    return [(_EQUAL, 0, len(body), number), *body]


def _if_stream(family: int) -> list[Instruction]:
    """Of sockets only streams of this family."""
    kind = [*_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM)]
    return [*_argument(0), (_EQUAL, 0, 3, family), *kind, _refuse(), _ALLOW]


def _if_argument(
    index: int, values: tuple[int, ...], then: Instruction, otherwise: Instruction
) -> list[Instruction]:
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*_argument(index), *tests, otherwise, then]


def _argument(index: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, 16 + 8 * index)
    ]  # the low half: what is tested here is a C int or fits one


def _refuse(number: int = errno.EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)  # error 0: the call does nothing and succeeds


def _numbers(table: str) -> list[int]:
    return [int(entry.partition("=")[2]) for entry in table.split()]


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
