"""URLs of servers: validation, loopback hosts, and hosts that are reached without a proxy."""

import ipaddress
import os
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_MAX_PORT = 65535


def without_proxy(*hosts: str) -> dict[str, str]:
    """Return environment variables with which a child process connects to `hosts` directly."""
    value = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if value != "*":  # "*" means all hosts, but only alone
        names = [*value.split(","), *hosts]
        value = ",".join(dict.fromkeys(name for name in names if name))
    return {"NO_PROXY": value, "no_proxy": value}


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# A Host header as browsers write it: in lower case, without user or path, and without a default port.
_HOST_HEADER = re.compile(
    r"(?P<host>[a-z0-9.-]+|\[(?P<ipv6>[0-9a-f:]+)\])(:(?P<port>[1-9][0-9]{0,4}))?"
)


def is_loopback_header(header: str) -> bool:
    """Return True if a Host header names this machine, in the form that browsers send."""
    match = _HOST_HEADER.fullmatch(header)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return False
    return is_loopback(match["ipv6"] or match["host"])


def _validate_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535
        valid = False
    if not valid:
        raise PydanticCustomError(
            "option", "expected http(s)://host/path, with a port from 1 to 65535 if any"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "may hold no user, password or query; keys go into key_variable or key_file"
        )
    return url


Url = Annotated[str, AfterValidator(_validate_url)]  # of a server, without credentials


def check_private(name: str, url: str | None) -> None:
    """Refuse a URL over which a key would travel unencrypted.

    Args:
        name: option that holds the URL, for the message.

    Raises:
        ValueError: the URL is http and its host is not loopback.
    """
    parts = urlsplit(url or "")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{name}: http would show the key to the network; use https")
