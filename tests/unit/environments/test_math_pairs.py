"""The golden pairs of answers through the real comparing process, and what an answer may hold before it gets there."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mcore_mas.rollout.environments.math import compare_answers
from mcore_mas.rollout.environments.math_equality import AnswerRefused, check_answer

PAIRS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data" / "math_pairs.jsonl").read_text().splitlines()
]


@pytest.mark.slow
def test_every_pair_has_its_verdict():
    """A verdict that changes with a version of math-verify fails here; known wrong ones say so in `why`."""
    assert min(Counter(pair["verdict"] for pair in PAIRS).values()) >= 4
    found = [pair | {"verdict": str(compare_answers(pair["given"], pair["truth"]))} for pair in PAIRS]
    assert [(one, pair["verdict"]) for one, pair in zip(found, PAIRS, strict=True) if one != pair] == []


def test_pairs_are_all_different():
    assert len({(pair["given"], pair["truth"]) for pair in PAIRS}) == len(PAIRS) >= 120


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing"),
        ("x" * 401, "401 characters; at most 400"),
        ("1," * 101 + "1", "101 commas; at most 100"),
        ("1" * 101, "a number of more than 100 digits"),
        ("(" * 31 + "1" + ")" * 31, "31 brackets in each other; at most 30"),
        ("10001!", "a factorial of more than 10000"),
        ("(10001)!", "a factorial of more than 10000"),
        ("8!!", "a factorial of more than 10000"),  # (8!)! = 40320!
        ("x^{10001}", "an exponent of more than 10000"),
        ("2^{10^{5}}", "an exponent of more than 10000"),
        ("9^9^9", "an exponent of more than 10000"),  # of the outer 9, 387420489
        ("(2^{9})^{9^{9}}", "an exponent of more than 10000"),
        ("2^{3\\cdot10^{4}}", "an exponent of more than 10000"),
        ("2^{5000+5001}", "an exponent of more than 10000"),
        ("2^{-10001}", "an exponent of more than 10000"),
        ("\\sum_{k=1}^{10^{9}}k", "an exponent of more than 10000"),
        ("\\binom{10001}{2}", "a binomial of more than 10000"),
        ("2^{99999", "an exponent of more than 10000"),  # never closed
    ],
)
def test_what_asks_for_too_much_is_refused(text, why):
    with pytest.raises(AnswerRefused, match=why.replace("(", "\\(")):
        check_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "x" * 400,
        "1" * 100,
        "10000!",
        "7!!",  # (7!)! = 5040!
        "x^{10000}",
        "2^{2^{13}}",  # 2^8192
        "2^{3^{2}}",
        "2025^{2024}",
        "(1+x)^{2024}",
        "2^{100}3^{50}",
        "123456^{2}+987654",
        "2^{\\frac{1}{2}}+20000",
        "10^{-9}",
        "2^{0.123456}",
        "e^{-x^2}",
        "}^{)!(^",
        "^",
        "!",
    ],
)
def test_what_a_problem_may_ask_for_is_read(text):
    check_answer(text)
