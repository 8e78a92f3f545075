"""An API key: read once from a variable or a file, never written, printed, inherited or pickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from rollout.remote.protocol import RemoteError

SHOWN_AT_MOST = 3  # first characters of a key, at the end of a text that was cut there
SHORTEST = 8  # characters; a shorter secret could not be taken out of a text without harm to the text


class Key:
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
        return "Key(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key does not leave its process")


def required(key: Key | None, provider: str) -> Key:
    """The key of a provider that answers nobody without one.

    Raises:
        RemoteError: there is none.
    """
    if key is None:
        raise RemoteError(f"provider '{provider}' needs a key; name key_variable or key_file")
    return key


_taken: dict[str, Key] = {}  # by variable, as found there, for another use in this process


def hide(variable: str | None) -> None:
    """Take a key out of the environment, if it is there, and keep it: child processes started from now on lack it."""
    value = os.environ.pop(variable, None) if variable else None
    if variable and value is not None:
        _taken[variable] = Key(value)


def read_key(variable: str | None, file: Path | None) -> Key | None:
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


def _checked(value: str, where: str) -> Key:
    value = value.strip()
    if len(value) < SHORTEST or not value.isascii() or not value.isprintable() or " " in value:
        raise RemoteError(f"{where}: not an API key; expected one word of at least {SHORTEST} ASCII characters")
    return Key(value)
