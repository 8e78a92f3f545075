"""Landlock: which files a process may open, for machines without user namespaces."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from . import linux

_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1, 2, 4, 8, 1 << 14  # linux/landlock.h
_CHARACTER_DEVICE, _BLOCK_DEVICE, _DEVICE_IOCTL = 1 << 6, 1 << 11, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_IOCTL
_FILE_SYSTEM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI version -> how many there are; 16 from version 5 on
_BIND_TCP, _CONNECT_TCP, _ABSTRACT_SOCKETS, _SIGNALS = 1, 2, 1, 2
_ASK_VERSION, _BENEATH = 1, 1


def version() -> int:
    """The kernel's Landlock version; 0 without it."""
    try:
        return linux.call("landlock_create_ruleset", None, 0, _ASK_VERSION)
    except OSError:
        return 0


def confine(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process and its children open only what is at or below these paths, and no device but /dev/null.

    Raises:
        OSError: the kernel has no Landlock.
    """
    abi = version()
    rights = (1 << _FILE_SYSTEM_RIGHTS.get(abi, 16)) - 1
    ports = _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0
    scopes = _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, ports, scopes))
    rules = linux.call("landlock_create_ruleset", attributes, size, 0)
    everything = rights & ~(_EXECUTE | _CHARACTER_DEVICE | _BLOCK_DEVICE | _DEVICE_IOCTL)
    for path in readable:
        _allow(rules, path, _EXECUTE | _READ | _LIST)
    for path in writable:
        _allow(rules, path, everything)
    _allow(rules, "/dev/null", _READ | _WRITE)
    linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
    linux.call("landlock_restrict_self", rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _FILE_RIGHTS
        linux.call(
            "landlock_add_rule", rules, _BENEATH, ctypes.create_string_buffer(struct.pack("=Qi", rights, place)), 0
        )
    finally:
        os.close(place)
