"""URLs of servers: validation, loopback hosts, and hosts without a proxy."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rollout.base.urls import Url, check_private, is_loopback, is_loopback_header, without_proxy


@pytest.mark.parametrize(
    "header",
    ["127.0.0.1", "127.0.0.1:8001", "127.1.2.3:65535", "localhost", "localhost:1", "[::1]:8001"],
)
def test_host_headers_of_this_machine_are_loopback(header: str) -> None:
    assert is_loopback_header(header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "evil.example",
        "evil.example:8001",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8001",
        "10.0.0.1",
        "[2001:db8::1]",
        # No browser sends these.
        "127.0.0.1:8001@evil.example",
        "evil.example@127.0.0.1:8001",
        "user@127.0.0.1",
        "127.0.0.1/path",
        "127.0.0.1?x",
        "127.0.0.1#x",
        "http://127.0.0.1",
        "127.0.0.1, evil.example",
        "127.0.0.1 evil.example",
        " 127.0.0.1",
        "127.0.0.1\n",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:080",
        "127.0.0.1:65536",
        "127.0.0.1:8001:8001",
        "127.0.0.1:x",
        "127.0.0.1:\u0661",
        "::1",
        "[::1",
        "[::1]evil.example",
        "[::1%lo]",
        "[127.0.0.1]",
        "[localhost]",
        "LOCALHOST",
        "127.1",
        "2130706433",
        "0x7f000001",
    ],
)
def test_other_host_headers_are_not_loopback(header: str) -> None:
    assert not is_loopback_header(header)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/path", "http://[::1]:1/"])
def test_urls_of_servers_are_accepted(url: str) -> None:
    assert TypeAdapter(Url).validate_python(url) == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("host:8000", "expected http"),
        ("ftp://host", "expected http"),
        ("http://", "expected http"),
        ("http://host:0", "expected http"),
        ("http://host:65536", "expected http"),
        ("http://user:word@host", "may hold no user, password or query"),
        ("http://host/?key=word", "may hold no user, password or query"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Url).validate_python(url)


def test_a_key_goes_over_https_or_loopback_only() -> None:
    check_private("url", "https://host")
    check_private("url", "http://localhost:8000")
    check_private("url", None)
    with pytest.raises(ValueError, match="url: http would show the key to the network; use https"):
        check_private("url", "http://host")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_hosts(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", "a,b"), ("example.org,a", "example.org,a,b"), ("*", "*")],
)
def test_hosts_are_added_to_those_without_a_proxy(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert without_proxy("a", "b") == {"NO_PROXY": expected, "no_proxy": expected}
