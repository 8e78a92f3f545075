"""Exact match and token F1 of short answers, as SQuAD computes them."""

from __future__ import annotations

import pytest

from rollout.environments.text_scores import exact_match, normalise, token_f1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("St. John's", "st johns"),
        ("the", ""),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("the Silver Harbor.", ["Silver Harbor"], 1.0),
        ("Harbor", ["Silver Harbor"], 0.0),
        ("wool", ["salt", "Wool"], 1.0),
        ("", ["the"], 0.0),
        ("wool", [], 0.0),
    ],
)
def test_exact_match(answer: str, references: list[str], score: float) -> None:
    assert exact_match(answer, references) == score


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("Harbor", ["Silver Harbor"], 2 / 3),  # precision 1, recall 1/2
        ("a b c d", ["b x", "c d"], 0.8),  # "a" is an article: 3 words against 2, 2 shared
        ("wool wool", ["wool"], 2 / 3),  # a repeated word counts once
        ("salt", ["wool"], 0.0),
        ("", ["wool"], 0.0),
        ("wool", [], 0.0),
    ],
)
def test_token_f1(answer: str, references: list[str], score: float) -> None:
    assert token_f1(answer, references) == pytest.approx(score)
