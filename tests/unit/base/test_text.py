"""Text that is safe to show."""

from __future__ import annotations

import logging

from rollout.base.text import (
    EscapingFormatter,
    escape_line,
    escape_text,
    truncate_middle,
    valid_text,
)


def test_characters_that_command_a_terminal_are_escaped() -> None:
    text = "a\tb\n\x1b]0;owned\x07 \x9b2J a\rb \u202eevil \ud800"
    escaped = "a\tb\n\\x1b]0;owned\\x07 \\x9b2J a\\rb \\u202eevil \\ud800"
    assert escape_text(text) == escaped
    assert escape_line(text) == escaped.replace("\n", "\\n")


def test_log_records_are_escaped() -> None:
    record = logging.makeLogRecord({"msg": "said %s", "args": ("\x1b[2J",)})
    assert EscapingFormatter("%(message)s").format(record) == r"said \x1b[2J"


def test_lone_surrogates_are_replaced() -> None:
    assert valid_text("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"
    assert valid_text("\U0001f600") == "\U0001f600"


def test_a_truncated_text_retains_both_ends() -> None:
    assert truncate_middle("abcdefg", 7) == "abcdefg"
    assert truncate_middle("abcdefg", 5) == "ab\n[... 3 characters ...]\nfg"
    assert truncate_middle("abcdefg", 1) == "\n[... 7 characters ...]\n"
