"""Messages between host and guest: one JSON object with open files, over a SOCK_SEQPACKET pair."""

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_BYTES, MAX_FILES = 65536, 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep the borders of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send `message` with copies of the descriptors `files`."""
    socket.send_fds(channel, [json.dumps(message).encode()], list(files))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors; EOFError if the other end is closed."""
    body, files, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_FILES)
    if not body:
        raise EOFError
    return json.loads(body), files
