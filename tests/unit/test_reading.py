"""The reading ease of the documents, worked out by hand on a small page."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.writers.reading import main, reading_of, sentences_of, syllables

PAGE = """# A heading is no sentence

The cat sat. Did `mcore_mas.Run` see
[the evaluation](a.md)?

- one apple

```python
print("not prose.")
```

| a table | is none |
"""


def test_a_page_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 words in 3 sentences; the 9 that are no name have 1+1+1, 1+1+1+4 and 1+2 groups of vowels."""
    assert sentences_of(PAGE) == ["The cat sat.", "Did _ see the evaluation?", "one apple"]
    read = reading_of(PAGE)
    assert (read.words, read.sentences, read.read, read.syllables) == (10, 3, 9, 13)
    assert read.ease == pytest.approx(206.835 - 1.015 * 10 / 3 - 84.6 * 13 / 9)
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "easy.md").write_text("I am. You are. It is.\n")
    main(tmp_path)
    heading, first, second, whole = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "README.md" and second.split() == ["docs/easy.md", "6", "6", "2.0", "120.2"]
    assert heading.split()[0] == "page" and whole.split()[2] == "16"


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("the", 1),
        ("table", 2),
        ("trained", 1),
        ("needed", 2),
        ("makes", 1),
        ("changes", 2),
        ("policy,", 3),
        ("38.0", 1),
    ],
)
def test_syllables(word: str, count: int) -> None:
    assert syllables(word) == count
