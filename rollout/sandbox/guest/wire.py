"""Messages between host and guest: JSON objects with open files, over SOCK_SEQPACKET sockets."""

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 65536
MAX_MESSAGE_FILES = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message with duplicates of the descriptors `files`."""
    socket.send_fds(channel, [json.dumps(message).encode()], list(files))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors; raise EOFError if the other end is closed."""
    body, files, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_MESSAGE_FILES)
    if not body:
        raise EOFError
    return json.loads(body), files
