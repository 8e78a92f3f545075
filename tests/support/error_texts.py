"""Texts of errors, without the parts that change when a test file is edited."""

import re


def without_location(error: str) -> str:
    """Return an error's text without the file and the line at its end, such as `(mine.py:12)`."""
    return re.sub(r" \([\w.<>]+:\d+\)$", "", error)
