"""The lines that docs/troubleshooting.md explains are lines of the code, its `…` standing for what is filled in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
FILLED = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # what an f-string fills in


def said() -> str:
    """All code of the product; texts that are cut over lines are one, what is filled in is `…`."""
    files = [
        path for top in ("mcore_mas", "rollout", "retrieval") for path in (ROOT / top).rglob("*.py")
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"…+", "…", re.sub(FILLED, "…", re.sub(r'"\s*f?"', "", code)))


CODE = said()


def test_the_page_has_lines() -> None:
    assert len(LINES) > 15


@pytest.mark.parametrize("line", LINES)
def test_the_code_says_it(line: str) -> None:
    for part in line.split("…"):
        assert part.strip(" ;:,'") in CODE, part


def test_what_nobody_says_is_seen() -> None:
    assert "is made of cheese" not in CODE
    assert "no such model folder; name one that is on this machine" in CODE
