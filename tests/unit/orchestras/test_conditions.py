"""Conditions of a graph's edges: their values, and the refusal of all other expressions."""

from __future__ import annotations

import pytest

from rollout.orchestras.conditions import parse_condition

VALUES = {"verdict": "yes", "verdict.runs": 2, "draft": "", "draft.text": "no tag"}


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_a_condition_is_evaluated_on_values(text: str, expected: bool) -> None:
    assert parse_condition(text).holds(VALUES) is expected


def test_each_name_is_listed_once() -> None:
    condition = parse_condition("verdict == 'a' or verdict == draft.text or len(draft)")
    assert condition.names == ("verdict", "draft.text", "draft")


@pytest.mark.parametrize(
    ("text", "refused_part"),
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
def test_other_python_expressions_are_refused(text: str, refused_part: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_condition(text)
    assert f"'{refused_part}' is not allowed; allowed: names, texts" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "verdict ==", "a = 1", "import os", "a; b", "\0", "(" * 300])
def test_a_text_that_is_not_an_expression_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="not an expression") as refusal:
        parse_condition(text)
    assert "\n" not in str(refusal.value)


def test_a_long_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 501 characters; at most 500"):
        parse_condition("a" * 501)


@pytest.mark.parametrize(
    "text", ["verdict < 3", "3 in verdict", "len(3) > 1", "verdict or draft < 3", "'a' in 3"]
)
def test_every_comparison_is_evaluated_so_that_type_errors_do_not_depend_on_values(
    text: str,
) -> None:
    with pytest.raises(ValueError, match="condition '"):
        parse_condition(text).holds(VALUES)
