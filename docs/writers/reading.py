"""How hard the documents are to read: `python -m docs.writers.reading [CHECKOUT]` prints a line for each page.

The reading ease is R. Flesch's, "A new readability yardstick", Journal of Applied Psychology 32 (1948) 221-233: 100 is
very easy, 60 plain English, 30 a scientific paper. Syllables are counted as groups of vowels, without silent endings.
Prose is what stands in sentences: no code blocks, tables, headings and comments. A name in backticks is a word of its
sentence, whose syllables are not counted.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_LEFT_OUT = r"^```.*?^```|<!--.*?-->|^\s*\|.*?$|^#.*?$|^\s*<[^>]+>\s*$"


@dataclass(frozen=True)
class Reading:
    """What a text counts."""

    all_words: int  # of the file, as `wc -w` counts
    words: int  # of its prose, as all below
    sentences: int
    read: int  # words that are no names
    syllables: int  # of these

    def __add__(self, other: Reading) -> Reading:
        return Reading(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def words_per_sentence(self) -> float:
        return self.words / max(1, self.sentences)

    @property
    def ease(self) -> float:
        """Flesch's reading ease."""
        return 206.835 - 1.015 * self.words_per_sentence - 84.6 * self.syllables / max(1, self.read)


def sentences_of(page: str) -> list[str]:
    """The sentences of a page's prose, names in backticks as `_`."""
    text = re.sub(_LEFT_OUT, "\n\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]+`", "_", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|(?<=[.!?])[)\"*]*\s+", text)
    return [" ".join(part.split()) for part in parts if re.search(r"[A-Za-z]", part)]


def syllables(word: str) -> int:
    """Syllables of a word, at least one."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    spoken = re.sub(r"(?<=[^aeiouyl])e$|(?<=[aeiou]l)e$|(?<=[^aeiouydt])ed$|(?<=[^aeiouycgsxz])es$", "", letters)
    return max(1, len(re.findall(r"[aeiouy]+", spoken)))


def reading_of(page: str) -> Reading:
    """What the text of a page counts."""
    sentences = sentences_of(page)
    words = [word for sentence in sentences for word in sentence.split() if re.search(r"\w", word)]
    read = [word for word in words if "_" not in word]
    return Reading(len(page.split()), len(words), len(sentences), len(read), sum(map(syllables, read)))


def main(checkout: Path) -> None:
    """Print the pages of a checkout, the hardest first, and their sum."""
    files = [checkout / "README.md", *sorted(checkout.glob("docs/*.md"))]
    read = {file.relative_to(checkout): reading_of(file.read_text(encoding="utf-8")) for file in files}
    rows = sorted(read.items(), key=lambda row: row[1].ease)
    print(f"{'page':<36}{'words':>8}{'of prose':>10}{'per sentence':>14}{'ease':>7}")
    for name, own in [*rows, ("all", sum(read.values(), Reading(0, 0, 0, 0, 0)))]:
        print(f"{name!s:<36}{own.all_words:>8}{own.words:>10}{own.words_per_sentence:>14.1f}{own.ease:>7.1f}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
