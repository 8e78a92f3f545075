"""Removal of secrets from text."""

from __future__ import annotations

import pytest

from rollout.base.redaction import redact_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:word@host/x", "http://[redacted]@host/x"),
        ("password=abc max_token=5", "password=[redacted] max_token=5"),
        ("key sk-0123456789 used", "key sk-[redacted] used"),
        ("token_file: a.txt", "token_file: a.txt"),
    ],
)
def test_secrets_are_redacted(text: str, expected: str) -> None:
    assert redact_secrets(text) == expected
