"""The math environment's scores."""

import asyncio

import pytest

from rollout.base.errors import EnvError
from rollout.environments.math import MathEnv
from rollout.environments.math_answers import compare_answers
from rollout.environments.math_notation import last_boxed
from rollout.records.trajectory import Task


def task(*answers):
    return Task(id="t9", prompt="?", answers=answers, env="math", source="s", split="test")


def score(text, *answers):
    env = MathEnv(task(*answers))
    assert env.reset(task(*answers)) == "?"
    return asyncio.run(env.step(text))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{42}", "42"),
        ("a \\boxed{1} b \\boxed{ 2 } c", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{1} then \\boxed{2", None),
        ("<think>\\boxed{1}</think> so nothing", None),
        ("<think>\\boxed{1}</think>\\boxed{3}", "3"),
        ("42", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("42", "42", True),
        ("042", "42", True),
        ("+42", "42", True),
        ("$1,234$", "1234", True),
        ("12.", "12", True),
        ("\\dfrac{1}{2}", "\\frac12", True),
        ("43", "42", False),
        ("-42", "42", False),
        ("1" * 5000, "2", False),
        ("", "0", False),
    ],
)
def test_equal_answers(answer, truth, equal):
    assert compare_answers(answer, truth) == ("equal" if equal else "different")


@pytest.mark.parametrize(
    ("text", "answers", "right", "threads"),
    [
        ("\\boxed{7}", ("7",), True, 0),
        ("\\boxed{8}", ("7",), False, 0),
        ("no box", ("x + 1",), False, 0),
        ("\\boxed{x+1}", ("y", "x + 1"), True, 1),  # the first truth is mathematics
        ("\\boxed{x+1}", ("x + 1", "y"), True, 0),
        ("\\boxed{1/2=0.5}", ("0.5",), True, 1),
        # Long answers are read in a thread, and not on the event loop.
        ("\\boxed{" + "1" * 300 + "}", ("1" * 300,), True, 1),
    ],
)
def test_answers_that_texts_decide_take_no_thread(monkeypatch, text, answers, right, threads):
    calls = []
    to_thread = asyncio.to_thread

    def to_thread_and_count(*arguments):
        calls.append(arguments)
        return to_thread(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread_and_count)
    assert score(text, *answers).reward == float(right)
    assert len(calls) == threads


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("1+x", "x+1", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("x", "y", False),
        # A variable with an index is no number with a base.
        ("y=x_1", "x_1", True),
        ("y=x_2", "x_1", False),
        ("E_1", "e_1", False),
        ("19_8", "19", False),
        ("}{", "5", False),
        ("seven", "7", False),
        # A truth of six digits or more may be rounded, but never to tens or units if it has a point.
        ("3.14159265", "3.14159", True),
        ("1234560", "1234560.00", True),
        ("1234563", "1234560.00", False),
        ("1234567.3", "1234567.0", False),
    ],
)
def test_equal_as_mathematics(answer, truth, equal):
    assert compare_answers(answer, truth) == ("equal" if equal else "different")


def test_right_answer_scores_one():
    step = score("7+5=12. \\boxed{12}", "12")
    assert (step.reward, step.done, step.metrics) == (1.0, True, {"answered": 1.0})


def test_any_accepted_answer_counts():
    assert score("\\boxed{12}", "11", "12").reward == 1.0


@pytest.mark.parametrize(
    ("text", "answered"), [("\\boxed{13}", 1.0), ("12", 0.0), ("\\boxed{}", 0.0), ("", 0.0)]
)
def test_wrong_or_missing_answer_scores_zero(text, answered):
    step = score(text, "12")
    assert (step.reward, step.metrics) == (0.0, {"answered": answered})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{ +12. }", "12"),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}"),
        ("12", ""),
        ("\\boxed{}", ""),
    ],
)
def test_equal_answers_are_written_equally(text, answer):
    assert score(text, "12").answer == answer


def test_task_without_answers_is_an_error_not_a_zero():
    with pytest.raises(EnvError, match="t9"):
        score("\\boxed{1}")
