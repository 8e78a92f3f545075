"""Landlock and seccomp filters, which limit the files and the system calls of this process."""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable

from . import linux

# --- Landlock (linux/landlock.h)

_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_FOLDER = 8
_MAKE_CHARACTER_DEVICE = 1 << 6
_MAKE_BLOCK_DEVICE = 1 << 11
_TRUNCATE = 1 << 14
_DEVICE_IOCTL = 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_IOCTL

_BIND_TCP = 1
_CONNECT_TCP = 2
_SCOPE_ABSTRACT_SOCKETS = 1
_SCOPE_SIGNALS = 2

_GET_VERSION = 1  # flag of landlock_create_ruleset
_RULE_PATH_BENEATH = 1
_RULE_PORT = 2

_TRUNCATE_VERSION = 3  # the first with a right to truncate files
_PORTS_VERSION = 4  # the first with rights to TCP ports
_SCOPES_VERSION = 6  # the first that knows signals and sockets without files
_RIGHT_COUNTS = {3: 15, 4: 15}  # number of rights by version; 16 from version 5 on

# --- seccomp (linux/bpf_common.h, linux/seccomp.h)

_LOAD = 0x20
_AND = 0x54
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ABOVE = 0x25
_IF_ANY_BIT = 0x45
_RETURN = 0x06

_RETURN_ERROR = 0x00050000
_RETURN_ALLOW = 0x7FFF0000
_RETURN_KILL_PROCESS = 0x80000000
_SET_MODE_FILTER = 2

# offsets in the data that a filter sees
_CALL_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16

_X86_64 = 0xC000003E
_X32_BIT = 0x40000000  # set in the numbers of the x32 ABI's calls

# --- system calls (asm/unistd_64.h)

# Calls that Python, its standard library and numerical packages need. There are no sockets but
# pairs; no tracing, mounting, keys, BPF, io_uring, shared memory segments; no priorities, affinity
# or clocks to set; and no timers with a signal of the program's choice, which could wake a paused
# program.
with open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "system_calls.txt"), encoding="ascii"
) as _calls_file:
    _ALLOWED_CALLS = _calls_file.read()

# Landlock does not check these calls. A program without a separate root file system could change
# the mode of its user's files and lock the user out.
_ATTRIBUTE_CALLS = (
    "chmod=90 fchmod=91 utime=132 utimes=235 futimesat=261 fchmodat=268 utimensat=280 fchmodat2=452"
)
_PROCESS_CALLS = "fork=57 vfork=58 execve=59 kill=62 tkill=200 tgkill=234"
_CONNECTION_CALLS = "connect=42 setsockopt=54 getsockopt=55"
_SESSION_CALLS = "setpgid=109 setsid=112"

_IOCTL = 16
_SOCKET = 41
_SENDTO = 44
_SENDMSG = 46
_SOCKETPAIR = 53
_CLONE = 56
_KILL = 62
_FCNTL = 72
_PRCTL = 157
_TGKILL = 234
_PRLIMIT = 302
_CLONE3 = 435
# Newer calls are refused as unknown (ENOSYS), so that libraries fall back to older ones.
_FIRST_RECENT_CALL = 424

# --- arguments of system calls

_MSG_FASTOPEN = 0x20000000  # lets sendto and sendmsg open a connection
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_SETOWN, F_SETSIG, F_SETOWN_EX: they have the kernel send signals in the program's name
_OWNER_COMMANDS = (8, 10, 15)
# PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_HARMLESS_PRCTL = (3, 15, 16, 0x53564D41)
_CLONE_NAMESPACES = 0x7E020080  # every CLONE_NEW*
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_AF_INET = 2
_SOCK_STREAM = 1
_SOCK_TYPE_MASK = 0xF

# operation, instructions to skip if true, instructions to skip if false, operand
Instruction = tuple[int, int, int, int]
_ALLOW: Instruction = (_RETURN, 0, 0, _RETURN_ALLOW)


def can_confine() -> bool:
    """Return True if this machine's kernel supports `confine_program`."""
    try:
        return platform.machine() == "x86_64" and _landlock_version() >= _SCOPES_VERSION
    except (OSError, AttributeError):
        return False


def confine_program(*, readable: Iterable[str], writable: Iterable[str], port: int) -> None:
    """Confine this process and the programs that it executes, for good.

    They reach these files, one TCP port and no other network, and no processes but their own.

    Args:
        readable: paths that may be read.
        writable: paths that may be written.
        port: TCP port that may be connected to.
    """
    confine_files(readable=readable, writable=writable, port=port)
    linux.drop_capabilities()
    install_filter(allow_processes=True, own_pid=0, allow_tcp=True)


def confine_files(*, readable: Iterable[str], writable: Iterable[str], port: int = 0) -> None:
    """Let this process and its children open only files at or below these paths, and /dev/null.

    If the kernel's Landlock can, it also refuses TCP connections other than to `port`, and signals and
    abstract sockets that lead to other processes.

    Args:
        readable: paths below which files may be read and executed.
        writable: paths below which files may be read, changed, made and removed, and not executed.
        port: TCP port that may be connected to; 0: none.

    Raises:
        OSError: the kernel has no Landlock, or one that does not protect files from being
            truncated.
    """
    version = _landlock_version()
    if version < _TRUNCATE_VERSION:
        raise OSError(
            errno.ENOSYS,
            f"Landlock is version {version}; version {_TRUNCATE_VERSION} (Linux 6.2) is needed, "
            "which protects files from being truncated",
        )

    rights = (1 << _RIGHT_COUNTS.get(version, 16)) - 1
    rules = _create_ruleset(version, rights)
    for path in readable:
        _allow_below(rules, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
    refused = _EXECUTE | _MAKE_CHARACTER_DEVICE | _MAKE_BLOCK_DEVICE | _DEVICE_IOCTL
    for path in writable:
        _allow_below(rules, path, rights & ~refused)
    _allow_below(rules, "/dev/null", _READ_FILE | _WRITE_FILE)
    if port:
        rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT_TCP, port))
        linux.call("landlock_add_rule", rules, _RULE_PORT, rule, 0)
    linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
    linux.call("landlock_restrict_self", rules, 0)
    os.close(rules)


def _landlock_version() -> int:
    return linux.call("landlock_create_ruleset", None, 0, _GET_VERSION)


def _create_ruleset(version: int, file_system_rights: int) -> int:
    """Return the descriptor of rules that refuse everything that this version of Landlock can refuse."""
    port_rights = 0
    scopes = 0
    size = 8  # bytes of the attributes; later versions have extended them
    if version >= _PORTS_VERSION:
        port_rights = _BIND_TCP | _CONNECT_TCP
        size = 16
    if version >= _SCOPES_VERSION:
        scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
        size = 24
    attributes = struct.pack("=QQQ", file_system_rights, port_rights, scopes)
    return linux.call("landlock_create_ruleset", ctypes.create_string_buffer(attributes), size, 0)


def _allow_below(rules: int, path: str, rights: int) -> None:
    """Allow these rights at and below a path; ignore a path that does not exist."""
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            rights &= _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, file))
        linux.call("landlock_add_rule", rules, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(file)


def install_filter(*, allow_processes: bool, own_pid: int, allow_tcp: bool = False) -> None:
    """Install a seccomp filter for this process and its children, for good.

    Args:
        allow_processes: True if the process may start others, signal them and change attributes of
            files, because namespaces or Landlock separate it from other processes. Otherwise it may
            have threads and signal itself, and changes of attributes do nothing.
        own_pid: id of the process; it is not used if `allow_processes` is True.
        allow_tcp: True if the process may open TCP connections. It then stays in its process group,
            and changes of attributes do nothing.
    """
    code = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in filter_program(allow_processes, own_pid, allow_tcp)
    )
    code_buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code_buffer))
    program_buffer = ctypes.create_string_buffer(program)
    linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
    linux.prctl(linux.SET_SECCOMP, _SET_MODE_FILTER, ctypes.addressof(program_buffer))


def filter_program(
    allow_processes: bool, own_pid: int, allow_tcp: bool = False
) -> list[Instruction]:
    """Return the BPF program of a filter; see `install_filter` for the arguments."""
    code = [
        *_kill_other_architectures(),
        *_check_sockets(allow_tcp),
        *_check_commands(),
        *_check_processes(allow_processes, own_pid),
    ]

    # these calls succeed and do nothing
    if allow_tcp or not allow_processes:
        for number in _numbers(_ATTRIBUTE_CALLS):
            code += _for_call(number, [_refuse(0)])

    for first, last in _ranges(_allowed_numbers(allow_processes, allow_tcp)):
        code += [(_IF_AT_LEAST, 0, 2, first), (_IF_ABOVE, 1, 0, last), _ALLOW]
    code += [(_IF_AT_LEAST, 0, 1, _FIRST_RECENT_CALL), _refuse(errno.ENOSYS), _refuse()]
    return code


def _kill_other_architectures() -> list[Instruction]:
    """Return the instructions that kill the process at a call of another architecture, and load the call's number."""
    kill: Instruction = (_RETURN, 0, 0, _RETURN_KILL_PROCESS)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _X86_64),
        kill,
        (_LOAD, 0, 0, _CALL_NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32_BIT),
        kill,
    ]


def _check_sockets(allow_tcp: bool) -> list[Instruction]:
    code = _for_call(_SOCKETPAIR, _allow_streams(_AF_UNIX))
    if allow_tcp:
        code += _for_call(_SOCKET, _allow_streams(_AF_INET))
        for number, flags_index in ((_SENDTO, 3), (_SENDMSG, 2)):
            code += _for_call(number, _refuse_any_bit(flags_index, _MSG_FASTOPEN))
    return code


def _check_commands() -> list[Instruction]:
    """Return the instructions that check calls with an argument that selects a command, such as ioctl."""
    return [
        *_for_call(_IOCTL, _if_argument(1, _TERMINAL_QUERIES, _ALLOW, _refuse(errno.ENOTTY))),
        *_for_call(_FCNTL, _if_argument(1, _OWNER_COMMANDS, _refuse(), _ALLOW)),
        *_for_call(_PRCTL, _if_argument(0, _HARMLESS_PRCTL, _ALLOW, _refuse())),
        *_for_call(_PRLIMIT, _if_argument(0, (0,), _ALLOW, _refuse())),
    ]


def _check_processes(allow_processes: bool, own_pid: int) -> list[Instruction]:
    """Return the instructions that restrict clone and, without `allow_processes`, kill.

    With `allow_processes` a clone may have no new namespaces. Otherwise it must be a thread, and
    only this process can be signaled.
    """
    # clone3 has its flags in memory that a filter cannot read; libc falls back to clone
    code = _for_call(_CLONE3, [_refuse(errno.ENOSYS)])
    if allow_processes:
        code += _for_call(_CLONE, _refuse_any_bit(0, _CLONE_NAMESPACES))
        return code

    code += _for_call(_CLONE, _require_any_bit(0, _CLONE_THREAD))
    for number in (_KILL, _TGKILL):
        code += _for_call(number, _if_argument(0, (own_pid,), _ALLOW, _refuse()))
    return code


def _allowed_numbers(allow_processes: bool, allow_tcp: bool) -> list[int]:
    """Return the numbers of the calls that are allowed with any arguments, sorted."""
    allowed = set(_numbers(_ALLOWED_CALLS))
    if allow_processes:
        allowed.update(_numbers(_PROCESS_CALLS))
        allowed.update(_numbers(_CONNECTION_CALLS if allow_tcp else _ATTRIBUTE_CALLS))
    if allow_tcp:
        allowed.difference_update(_numbers(_SESSION_CALLS))
    return sorted(allowed)


def _for_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which ends with a decision, for the call of this number only."""
    return [(_IF_EQUAL, 0, len(body), number), *body]


def _allow_streams(family: int) -> list[Instruction]:
    """Allow sockets of this family and of type SOCK_STREAM; refuse all other sockets."""
    return [
        *_load_argument(0),
        (_IF_EQUAL, 0, 3, family),
        *_load_argument(1),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_IF_EQUAL, 1, 0, _SOCK_STREAM),
        _refuse(),
        _ALLOW,
    ]


def _refuse_any_bit(index: int, bits: int) -> list[Instruction]:
    """Refuse the call if an argument has any of these bits; allow it otherwise."""
    return [*_load_argument(index), (_IF_ANY_BIT, 0, 1, bits), _refuse(), _ALLOW]


def _require_any_bit(index: int, bits: int) -> list[Instruction]:
    """Allow the call if an argument has any of these bits; refuse it otherwise."""
    return [*_load_argument(index), (_IF_ANY_BIT, 1, 0, bits), _refuse(), _ALLOW]


def _if_argument(
    index: int, values: tuple[int, ...], then: Instruction, otherwise: Instruction
) -> list[Instruction]:
    """Decide `then` if an argument has one of these values, else `otherwise`."""
    tests = [(_IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*_load_argument(index), *tests, otherwise, then]


def _load_argument(index: int) -> list[Instruction]:
    # The lower half suffices: every argument that is tested is a C int, or fits into one.
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index)]


def _refuse(error_number: int = errno.EPERM) -> Instruction:
    """Return the decision to fail with an error; a call with error 0 succeeds and does nothing."""
    return (_RETURN, 0, 0, _RETURN_ERROR | error_number)


def _numbers(table: str) -> list[int]:
    """Return the numbers in a table of `name=number`."""
    return [int(entry.partition("=")[2]) for entry in table.split()]


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of every run of consecutive numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
