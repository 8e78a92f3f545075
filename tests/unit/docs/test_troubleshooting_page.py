"""Messages that docs/troubleshooting.md explains exist in the code; `…` stands for the values of f-strings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)


def source_code() -> str:
    """Return the code of the packages, with joined strings and with `…` for the fields of f-strings."""
    files: list[Path] = []
    for package in ("mcore_mas", "rollout", "retrieval"):
        files += (ROOT / package).rglob("*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r'"\s*f?"', "", code)  # a string that is written in several lines
    without_fields = re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "…", joined)
    return re.sub(r"…+", "…", without_fields)


CODE = source_code()


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(message: str) -> None:
    for part in message.split("…"):
        assert part.strip(" ;:,'") in CODE, part


def test_a_message_that_is_not_in_the_code_is_noticed() -> None:
    assert "is made of cheese" not in CODE
    assert "no such model folder; name one that is on this machine" in CODE
