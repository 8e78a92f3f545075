"""Decoys of expected values."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import pytest

from rollout.environments.decoys import draw_candidates


@pytest.mark.parametrize(
    "expected", [5, 0.25, "a text", b"x", [1, "b"], (2,), {"k": 1}, {1, 2}, 1j, "", [], -(10**30)]
)
def test_the_expected_value_is_among_fifteen_different_decoys(expected: Any) -> None:
    candidates = draw_candidates(expected)
    values = [literal_eval(text) for text in candidates.texts]
    assert len(set(candidates.texts)) == 16
    assert values[candidates.expected] == expected
    assert sum(value == expected for value in values) == 1


def test_the_decoys_of_a_number_are_near_it_except_for_two() -> None:
    values = [literal_eval(text) for text in draw_candidates(5).texts]
    distant_values = [value for value in values if abs(value - 5) > 1000]
    assert sorted(distant_values) == [-(10**15), 10**15]


@pytest.mark.parametrize("expected", [True, False, None])
def test_singletons_have_decoys(expected: Any) -> None:
    candidates = draw_candidates(expected)
    assert len(candidates.texts) == 16
    assert literal_eval(candidates.texts[candidates.expected]) is expected


def test_the_decoys_of_the_largest_number_are_literals() -> None:
    largest = 1.7976931348623157e308
    for _ in range(20):
        candidates = draw_candidates(largest)
        values = [literal_eval(text) for text in candidates.texts]
        assert sum(value == largest for value in values) == 1


def test_the_expected_number_is_seldom_the_middle_of_all() -> None:
    medians = 0
    for _ in range(200):
        candidates = draw_candidates(50)
        values = sorted(literal_eval(text) for text in candidates.texts)
        medians += values.index(50) in (7, 8)
    assert medians < 80
