"""API keys are read once, appear in one header only, and are not inherited by child processes."""

from __future__ import annotations

import asyncio
import copy
import io
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout.engines.remote import RemoteError, keys
from rollout.engines.remote.keys import read_key
from rollout.records.trajectory import Group
from rollout.rewards.coach import Coach
from rollout.rewards.coach_config import CoachConfig
from tests.support.chat_server import Response, chat_server, says
from tests.support.coached import config, group, trajectory, turn

SECRET = "sk-0123456789abcdefSECRET"
VARIABLE = "COACH_TEST_KEY"


@pytest.fixture(autouse=True)
def no_hidden_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_hidden_keys", {})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "key"
    path.parent.mkdir()
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def one_turn(text: str = "x") -> list[Group]:
    return [group(trajectory(turn(0, "solver", text)))]


@contextmanager
def debug_log() -> Iterator[io.StringIO]:
    """Record the log of all libraries at level DEBUG."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield log
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_the_key_is_in_the_header_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    folder = tmp_path / "cache"
    shown: list[str] = []

    def quote_key(_: dict[str, Any], number: int) -> Response:
        """Quote the key in the reply, and then in errors."""
        if number == 0:
            return says(f"I saw {SECRET}.\nPROCESS_SCORE: 7")
        # The message is cut within the second key.
        message = f"bad key {SECRET}" + 170 * "." + f" bad key {SECRET}"
        return Response(message.encode(), status=(500, 400, 401)[number - 1])

    async def score(coach_config: CoachConfig) -> None:
        async with aclosing(Coach(coach_config, folder)) as coach:
            groups = await coach.score(one_turn("a"))
            shown.extend(map(repr, (groups, coach.metrics(), vars(coach), vars(coach._caller))))
            for text in ("b", "c", "d"):
                try:
                    await coach.score(one_turn(text))
                except RemoteError:
                    shown.append(traceback.format_exc())
                shown.append(coach.last_failure)

    with chat_server(quote_key) as server, debug_log() as log:
        coach_config = config(server.url, key_variable=VARIABLE, retries=0)
        shown += [repr(coach_config), coach_config.model_dump_json()]
        asyncio.run(score(coach_config))
    sent_keys = {header(headers, "authorization") for headers in server.headers}
    assert sent_keys == {f"Bearer {SECRET}"}
    assert SECRET not in repr(server.bodies)

    # The errors and the log were there to be looked at.
    texts = "".join(shown)
    assert "status 401: bad key [key]" in texts
    assert "status 500: bad key [key]" in texts
    assert "HTTP Request: POST" in log.getvalue()
    assert b"I saw [key]" in (folder / "ledger.sqlite").read_bytes()

    assert SECRET[:8] not in texts + log.getvalue() + "".join(capfd.readouterr())
    for path in folder.rglob("*"):
        assert SECRET.encode() not in path.read_bytes()


def header(headers: dict[str, str], name: str) -> str | None:
    return {key.lower(): value for key, value in headers.items()}.get(name)


def test_children_do_not_inherit_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    first = read_key(VARIABLE, None)
    assert first is not None
    assert first.get_secret_value() == SECRET

    assert VARIABLE not in os.environ
    command = [sys.executable, "-c", "import os; print(os.environ)"]
    child = subprocess.run(command, capture_output=True, check=True)
    assert SECRET.encode() not in child.stdout

    second = read_key(VARIABLE, None)  # another use in this process
    assert second is not None
    assert second.get_secret_value() == SECRET


def test_a_key_is_not_shown_copied_or_sent_away(key_file: Path) -> None:
    key = read_key(None, key_file)
    assert key is not None
    assert key.get_secret_value() == SECRET
    assert f"{key} {key!r}" == "********** ApiKey('**********')"
    with pytest.raises(TypeError, match="does not leave its process"):
        copy.copy(key)


def test_a_key_is_redacted_also_where_it_is_cut_off(key_file: Path) -> None:
    key = read_key(None, key_file)
    assert key is not None
    assert key.redact(f"a {SECRET} b") == "a [key] b"
    for length in range(4, len(SECRET)):
        assert key.redact(f"a {SECRET} b {SECRET[:length]}") == "a [key] b [key]"
    assert key.redact(f"ends in {SECRET[:3]}") == f"ends in {SECRET[:3]}"


def test_without_a_key_there_is_no_header(tmp_path: Path) -> None:
    async def score(url: str) -> None:
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            await coach.score(one_turn())

    with chat_server(says("PROCESS_SCORE: 1")) as server:
        asyncio.run(score(server.url))
    assert header(server.headers[0], "authorization") is None


def test_unusable_keys_are_named_but_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
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
        ({"request": {"stream": True}}, "replies are read whole, so leave it out"),
        ({"fallback": 11}, "less than or equal to 10"),
    ],
)
def test_configs_that_would_leak_a_key_or_mislead_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**{"url": "https://example.org/v1", **fields})


def test_http_is_accepted_on_this_machine_and_without_a_key() -> None:
    assert config("http://127.0.0.1:1/v1", key_variable="K").key_variable == "K"
    assert config("http://node7:1/v1").url == "http://node7:1/v1"
