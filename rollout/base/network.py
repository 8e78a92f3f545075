"""Ports and network interfaces of this machine."""

import socket

import psutil


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of a local address on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with an IP address; raise LookupError if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise LookupError(f"no network interface of this machine has the address {address}")
