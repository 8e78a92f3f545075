"""Providers of frozen models: what they promise, how calls fail, and an API key that is never written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rollout.base.http import Unanswered, retry_after_s
from rollout.records.trajectory import Message

SHOWN = 200  # characters of a server's own words in an error


class RemoteError(RuntimeError):
    """A frozen model cannot be used at all: one line that says what, where, what to do."""


class CallRefused(RuntimeError):
    """The server will not answer this prompt, however often it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """How one reply is sampled."""

    temperature: float = 0.0
    max_tokens: int = 1024
    top_p: float = 1.0
    seed: int | None = None  # None: not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said."""

    text: str
    finish_reason: str  # stop | length | the vendor's own word
    prompt_tokens: int | None  # as the server counted them, None if it did not say
    completion_tokens: int | None


class Provider(Protocol):
    """A vendor's API. It makes one call and knows nothing of retries, caches or budgets."""

    async def complete(self, messages: Sequence[Message], settings: ReplySettings) -> Answer:
        """Ask once.

        Raises:
            Unanswered: no usable reply this time.
            CallRefused: this prompt will not be answered.
            RemoteError: no prompt will be answered (key, model, URL, quota).
        """

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""


def status_error(status: int, body: str, headers: Mapping[str, str]) -> Exception:
    """The error that an HTTP status other than 200 means; all vendors use the same numbers."""
    trouble = f"status {status}: {' '.join(body[:SHOWN].split())}"
    if status in (401, 402, 403, 404) or 300 <= status < 400 or (status == 429 and _out_of_quota(body)):
        return RemoteError(trouble)
    if status in (408, 409, 425, 429) or status >= 500:
        return Unanswered(trouble, retry_after_s=retry_after_s(headers), unbilled=True)
    return CallRefused(trouble)


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system's words, None without any, and all other messages: some APIs want them apart."""
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    return system or None, [message for message in messages if message.role != "system"]


def filled(*fields: Mapping[str, Any]) -> dict[str, Any]:
    """One request's fields, later mappings over earlier ones, without those that are None."""
    merged = {name: value for own in fields for name, value in own.items()}
    return {name: value for name, value in merged.items() if value is not None}


def counted(value: object) -> int | None:
    """A server's count of tokens, None if it is no count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _out_of_quota(body: str) -> bool:
    """OpenAI says 429 both for "slow down" and for "no money left"."""
    try:
        return bool(json.loads(body)["error"]["code"] == "insufficient_quota")
    except (ValueError, KeyError, TypeError):
        return False


SHOWN_AT_MOST = 3  # first characters of a key, at the end of a text that was cut there
SHORTEST = 8  # characters; a shorter secret could not be taken out of a text without harm to the text


class ApiKey:
    """A secret that shows itself only to `reveal`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The key, for the one header it belongs in."""
        return self._value

    def redact(self, text: str) -> str:
        """`text` without the key, also where it was cut off within: servers quote it in error messages."""
        text = text.replace(self._value, "[key]")
        for length in range(len(self._value) - 1, SHOWN_AT_MOST, -1):
            if text.endswith(self._value[:length]):
                return text[:-length] + "[key]"
        return text

    def __repr__(self) -> str:
        return "ApiKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key does not leave its process")


def required(key: ApiKey | None, provider: str) -> ApiKey:
    """The key of a provider that answers nobody without one.

    Raises:
        RemoteError: there is none.
    """
    if key is None:
        raise RemoteError(f"provider '{provider}' needs a key; name key_variable or key_file")
    return key


_taken: dict[str, ApiKey] = {}  # by variable, as found there, for another use in this process


def hide(variable: str | None) -> None:
    """Take a key out of the environment, if it is there, and keep it: child processes started from now on lack it."""
    value = os.environ.pop(variable, None) if variable else None
    if variable and value is not None:
        _taken[variable] = ApiKey(value)


def read_key(variable: str | None, file: Path | None) -> ApiKey | None:
    """The key in `file`, or in the environment's `variable`, which is removed there so that no child inherits it.

    Raises:
        RemoteError: both or the named one cannot be read; the message never holds the value.
    """
    if file is not None:
        return _checked(_read(file), str(file))
    if variable is None:
        return None
    hide(variable)
    if variable not in _taken:
        raise RemoteError(f"the environment has no {variable}; set it, or name a file in key_file")
    return _checked(_taken[variable].reveal(), variable)


def _read(file: Path) -> str:
    try:
        if file.stat().st_mode & 0o077:
            raise RemoteError(f"{file}: others may read this key; run `chmod 600 {file}`")
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RemoteError(f"{file}: cannot read the key ({type(error).__name__}); expected one line of text") from None


def _checked(value: str, where: str) -> ApiKey:
    value = value.strip()
    if len(value) < SHORTEST or not value.isascii() or not value.isprintable() or " " in value:
        raise RemoteError(f"{where}: not an API key; expected one word of at least {SHORTEST} ASCII characters")
    return ApiKey(value)
