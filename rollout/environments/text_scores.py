"""Scores of a short text answer against reference answers, as SQuAD and Search-R1 define them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """`text` in lower case without ASCII punctuation, then without articles, with single spaces."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """1.0 when the normalised answer equals a normalised reference, else 0.0; an empty answer never matches."""
    got = normalise(answer)
    return float(bool(got) and any(got == normalise(reference) for reference in references))


def token_f1(answer: str, references: Iterable[str]) -> float:
    """The best F1 in [0, 1] of the answer's normalised words against a reference's, as bags of words."""
    return max((_f1(normalise(answer).split(), normalise(reference).split()) for reference in references), default=0.0)


def _f1(got: list[str], expected: list[str]) -> float:
    # F1 = 2 P R / (P + R) with P = shared / |got|, R = shared / |expected|
    shared = sum((Counter(got) & Counter(expected)).values())
    return 2 * shared / (len(got) + len(expected)) if shared else 0.0
