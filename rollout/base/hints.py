"""Hints at misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_hint(name: str, choices: Iterable[str], label: str = "nearest") -> str:
    """Return "; nearest: a, b" with the choices that are similar to a name, or "" if none is.

    The hint is a part of an error message about the name. Another `label`, such as "nearest agents", says what the
    choices are if the message is about something else.
    """
    # With this cutoff, names of three letters are similar if two of the letters match in order, as in
    # "atc" and "act", or "abc" and "abd".
    names = get_close_matches(name, list(dict.fromkeys(choices)), n=3, cutoff=0.66)
    return f"; {label}: {', '.join(names)}" if names else ""
