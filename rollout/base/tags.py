"""Tags: how an agent's reply marks the part that counts."""

from __future__ import annotations

_THOUGHT = "</think>"


def last_tag(text: str, name: str) -> str | None:
    """The stripped content of the last complete `<name>…</name>` in `text`; None when there is none.

    The innermost opening tag counts, so an earlier tag that was never closed is skipped.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def after_thought(text: str) -> str:
    """What was said after any thought, stripped."""
    return text.rpartition(_THOUGHT)[2].strip()
