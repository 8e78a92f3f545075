"""Conditions: what they say of values, and everything else that Python could say is refused."""

from __future__ import annotations

import pytest

from rollout.orchestras.graph import read_expression

VALUES = {"verdict": "yes", "verdict.runs": 2, "draft": "", "draft.text": "no tag"}


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("verdict == 'yes'", True),
        ("verdict != 'yes' or verdict.runs >= 2", True),
        ("verdict == 'yes' and verdict.runs < 2", False),
        ("not draft", True),
        ("draft", False),
        ("1 < verdict.runs <= 2", True),
        ("1 < verdict.runs < 2", False),
        ("verdict in ('no', 'yes')", True),
        ("verdict not in ['no', 'perhaps']", True),
        ("'tag' in draft.text", True),
        ("len(draft.text) == 6", True),
        ("verdict.runs == 2.0 and True", True),
    ],
)
def test_conditions_are_about_values(text: str, truth: bool) -> None:
    assert read_expression(text).holds(VALUES) is truth


def test_names_are_listed_once() -> None:
    assert read_expression("verdict == 'a' or verdict == draft.text or len(draft)").names == (
        "verdict",
        "draft.text",
        "draft",
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("verdict.text.format", "verdict.text.format"),
        ("(1).real", "1 .real"),
        ("verdict[0] == 'y'", "verdict[0]"),
        ("len(verdict, draft)", "len(verdict, draft)"),
        ("len(*verdict)", "*verdict"),
        ("open('x')", "open('x')"),
        ("9 ** 9 ** 9 > 1", "9 ** 9 ** 9"),
        ("'a' * 9 == verdict", "'a' * 9"),
        ("-verdict.runs < 1", "-verdict.runs"),
        ("verdict is None", "verdict is None"),
        ("None == verdict", "None"),
        ("b'a' == verdict", "b'a'"),
        ("[x for x in verdict]", "[x for x in verdict]"),
        ("(x := 1) == 1", "(x := 1)"),
        ("lambda: 1", "lambda: 1"),
        ("f'{verdict}' == 'a'", "f'{verdict}'"),
        ("1 if verdict else 2", "1 if verdict else 2"),
        ("{'a': 1}", "{'a': 1}"),
    ],
)
def test_nothing_else_is_allowed(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_expression(text)
    assert f"'{part}' is not allowed; allowed: names, texts" in str(caught.value)


@pytest.mark.parametrize("text", ["", "verdict ==", "a = 1", "import os", "a; b", "\0", "(" * 300])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an expression") as caught:
        read_expression(text)
    assert "\n" not in str(caught.value)


def test_a_condition_is_short() -> None:
    with pytest.raises(ValueError, match="501 characters; at most 500"):
        read_expression("a" * 501)


@pytest.mark.parametrize(
    "text", ["verdict < 3", "3 in verdict", "len(3) > 1", "verdict or draft < 3", "'a' in 3"]
)
def test_values_that_cannot_be_compared_are_refused_whatever_they_are(text: str) -> None:
    with pytest.raises(ValueError, match="condition '"):
        read_expression(text).holds(VALUES)
