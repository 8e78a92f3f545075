"""API keys: read from a file or the environment, and kept out of logs and child processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr

from retrieval.regular_files import read_regular_text
from rollout.engines.remote.errors import RemoteError

# A key may be cut off at the end of a text. Up to this number of its first characters stay visible there.
SHOWN_KEY_CHARS = 3
# A shorter key could not be redacted without harm to other words of a text.
_MIN_KEY_CHARS = 8

# Keys that were removed from the environment, by variable, for further uses in this process.
_hidden_keys: dict[str, ApiKey] = {}


class ApiKey(SecretStr):
    """Secret that only `get_secret_value` returns, and that cannot be pickled or copied."""

    def redact(self, text: str) -> str:
        """Return `text` with "[key]" in place of the key, which servers quote in error messages.

        The beginning of a key at the end of the text, where it may be cut off, is replaced too.
        """
        key = self.get_secret_value()
        text = text.replace(key, "[key]")
        for length in range(len(key) - 1, SHOWN_KEY_CHARS, -1):
            if text.endswith(key[:length]):
                return text[:-length] + "[key]"
        return text

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key does not leave its process")


def hide_key(variable: str | None) -> None:
    """Move a key from the environment into this process's memory, so that child processes do not inherit it."""
    if variable is None:
        return
    value = os.environ.pop(variable, None)
    if value is not None:
        _hidden_keys[variable] = ApiKey(value)


def has_key(variable: str) -> bool:
    """Return True if the environment has a value of this variable, or had one that was hidden."""
    return variable in _hidden_keys or bool(os.environ.get(variable))


def read_key(variable: str | None, file: Path | None) -> ApiKey | None:
    """Read a key from a file, or from an environment variable, which is then hidden.

    Returns:
        The key, or None if neither is named.

    Raises:
        RemoteError: there is no key, or it cannot be used. The message does not contain the key.
    """
    if file is not None:
        return _validate_key(_read_key_file(file), str(file))
    if variable is None:
        return None
    hide_key(variable)
    key = _hidden_keys.get(variable)
    if key is None:
        raise RemoteError(f"the environment has no {variable}; set it, or name a file in key_file")
    return _validate_key(key.get_secret_value(), variable)


def require_key(key: ApiKey | None, provider: str) -> ApiKey:
    """Return the key; raise RemoteError if there is none, for a provider that needs one."""
    if key is None:
        raise RemoteError(f"provider '{provider}' needs a key; name key_variable or key_file")
    return key


def _read_key_file(file: Path) -> str:
    try:
        if file.stat().st_mode & 0o077:
            raise RemoteError(f"{file}: others may read this key; run `chmod 600 {file}`")
        return read_regular_text(file)
    except (OSError, ValueError) as error:
        raise RemoteError(
            f"{file}: cannot read the key ({type(error).__name__}); expected one line of text"
        ) from None


def _validate_key(value: str, source: str) -> ApiKey:
    value = value.strip()
    is_word = value.isascii() and value.isprintable() and " " not in value
    if not is_word or len(value) < _MIN_KEY_CHARS:
        raise RemoteError(
            f"{source}: not an API key; expected one word of at least {_MIN_KEY_CHARS} ASCII "
            "characters"
        )
    return ApiKey(value)
