"""Scores of short text answers, as SQuAD computes them: exact match and token F1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and articles, with single spaces."""
    text = text.lower().translate(_REMOVE_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """Return 1.0 if the normalised answer equals a normalised reference, else 0.0.

    An empty answer equals nothing.
    """
    normalised = normalise(answer)
    if not normalised:
        return 0.0
    return float(any(normalised == normalise(reference) for reference in references))


def token_f1(answer: str, references: Iterable[str]) -> float:
    """Return the best F1 in [0, 1] of an answer's normalised words against a reference's.

    Words are compared as multisets: a word counts as often as it occurs in both.
    """
    words = Counter(normalise(answer).split())
    best = 0.0
    for reference in references:
        reference_words = Counter(normalise(reference).split())
        shared = (words & reference_words).total()
        # F1 = 2 P R / (P + R) with P = shared / |answer| and R = shared / |reference|
        f1 = 2 * shared / max(words.total() + reference_words.total(), 1)
        best = max(best, f1)
    return best


AnswerReward = Literal["exact_match", "token_f1"]
REWARDS: dict[AnswerReward, Callable[[str, Iterable[str]], float]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
}
