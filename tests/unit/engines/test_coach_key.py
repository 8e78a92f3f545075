"""A key is read once and appears in one header, and nowhere else."""

import asyncio
import copy
import io
import logging
import os
import subprocess
import sys
import traceback
from contextlib import aclosing
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout.base.http import retry_after_s
from rollout.engines import remote as keys
from rollout.engines.remote import RemoteError, read_key
from rollout.rewards.coach import Coach
from tests.support.chat_server import Response, chat_server, says
from tests.support.coached import config, group, trajectory, turn

SECRET = "sk-0123456789abcdefSECRET"
VARIABLE = "COACH_TEST_KEY"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(keys, "_taken", {})


@pytest.fixture
def key_file(tmp_path) -> Path:
    path = tmp_path / "elsewhere" / "key"
    path.parent.mkdir()
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def one(text="x"):
    return [group(trajectory(turn(0, "solver", text)))]


def test_the_key_is_in_the_header_and_nowhere_else(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    folder = tmp_path / "cache"
    log = io.StringIO()
    listener = logging.StreamHandler(log)
    root = logging.getLogger()
    before = root.level
    root.addHandler(listener)
    root.setLevel(logging.DEBUG)
    leaks = []  # a server that shows the key in everything it says

    def script(_, number):
        if number == 0:
            return says(f"I saw {SECRET}.\nPROCESS_SCORE: 7")
        long = f"bad key {SECRET}" + 170 * "." + f" bad key {SECRET}"  # is cut within the second
        return Response(long.encode(), status=(500, 400, 401)[number - 1])

    async def run(coach_config):
        async with aclosing(Coach(coach_config, folder)) as coach:
            groups = await coach.score(one("a"))
            leaks.extend(
                [repr(groups), repr(coach.metrics()), repr(vars(coach)), repr(vars(coach._caller))]
            )
            for text in ("b", "c", "d"):
                try:
                    await coach.score(one(text))
                except RemoteError:
                    leaks.append(traceback.format_exc())
                leaks.append(coach.last_failure)

    try:
        with chat_server(script) as server:
            coach_config = config(server.url, key_variable=VARIABLE, retries=0)
            leaks += [repr(coach_config), coach_config.model_dump_json()]
            asyncio.run(run(coach_config))
            assert {h["authorization"] for h in map(lower, server.headers)} == {f"Bearer {SECRET}"}
            assert SECRET not in repr(server.bodies)
    finally:
        root.removeHandler(listener)
        root.setLevel(before)
    assert any(
        "status 401: bad key [key]" in text for text in leaks
    )  # the errors were there to be looked at
    assert "status 500: bad key [key]" in "".join(leaks)
    assert "HTTP Request: POST" in log.getvalue()
    assert SECRET[:8] not in "".join(leaks) + log.getvalue() + "".join(capfd.readouterr())
    for path in folder.rglob("*"):
        assert SECRET.encode() not in path.read_bytes()
    assert b"I saw [key]" in (folder / "ledger.sqlite").read_bytes()


def lower(headers):
    return {name.lower(): value for name, value in headers.items()}


def test_children_do_not_inherit_the_key(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    first = read_key(VARIABLE, None)
    assert VARIABLE not in os.environ
    shown = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ)"], capture_output=True, check=True
    )
    assert SECRET.encode() not in shown.stdout
    assert read_key(VARIABLE, None).get_secret_value() == SECRET  # a second use in the same process
    assert first.get_secret_value() == SECRET


def test_a_key_is_not_shown_copied_or_sent_away(key_file) -> None:
    key = read_key(None, key_file)
    assert key.get_secret_value() == SECRET
    assert f"{key} {key!r}" == "********** ApiKey('**********')"
    assert key.redact(f"a {SECRET} b") == "a [key] b"
    for cut in range(4, len(SECRET)):  # the end of a long error message
        assert key.redact(f"a {SECRET} b {SECRET[:cut]}") == "a [key] b [key]"
    assert key.redact(f"ends in {SECRET[:3]}") == f"ends in {SECRET[:3]}"
    with pytest.raises(TypeError, match="does not leave its process"):
        copy.copy(key)


def test_no_key_no_header(tmp_path) -> None:
    async def run(url):
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            await coach.score(one())

    with chat_server(says("PROCESS_SCORE: 1")) as server:
        asyncio.run(run(server.url))
    assert "authorization" not in lower(server.headers[0])


def test_keys_that_cannot_be_used_are_named_but_not_shown(tmp_path, monkeypatch, key_file) -> None:
    with pytest.raises(RemoteError, match="the environment has no NOT_SET_AT_ALL; set it"):
        read_key("NOT_SET_AT_ALL", None)
    with pytest.raises(RemoteError, match=r"missing: cannot read the key \(FileNotFoundError\)"):
        read_key(None, tmp_path / "missing")
    key_file.chmod(0o644)
    with pytest.raises(RemoteError, match="others may read this key; run `chmod 600"):
        read_key(None, key_file)
    for value in ("short", "two words of text", "schlüsselschlüssel", "line\nline\nline"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(RemoteError, match=f"{VARIABLE}: not an API key") as caught:
            read_key(VARIABLE, None)
        assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"url": "http://coach.example.org/v1", "key_variable": "K"},
            "http would show the key to the network",
        ),
        ({"url": "https://user:pw@example.org/v1"}, "may hold no user, password or query"),
        ({"url": "https://example.org/v1?key=abc"}, "may hold no user, password or query"),
        ({"url": "example.org"}, "expected http"),
        ({"key_variable": "K", "key_file": "f"}, "both set; name one"),
        (
            {"provider": "opnai"},
            "unknown provider 'opnai'; nearest: openai; known: anthropic, gemini, openai",
        ),
        ({"budget": {"money": 1.0}}, "budget.money is set without prices"),
        ({"fallback": 11}, "less than or equal to 10"),
    ],
)
def test_configs_that_would_leak_or_mislead_are_refused(fields, message) -> None:
    with pytest.raises((ValidationError, ValueError), match=message):
        config(**{"url": "https://example.org/v1", **fields})


def test_http_is_enough_on_this_machine_and_without_a_key() -> None:
    assert config("http://127.0.0.1:1/v1", key_variable="K").key_variable == "K"
    assert config("http://node7:1/v1").url == "http://node7:1/v1"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 0.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "nan"}, 0.0),
    ],
)
def test_retry_after(headers, seconds) -> None:
    assert retry_after_s(headers, now=60.0) == seconds
