"""Verdicts are read strictly: what is not a score is never taken for one."""

import pytest

from rollout.rewards.coach_verdict import MalformedVerdict, parse_verdict


@pytest.mark.parametrize(
    ("reply", "process"),
    [
        ("PROCESS_SCORE: 7", 7.0),
        ("It is fine.\n\nPROCESS_SCORE: 6.5\n", 6.5),
        ("**PROCESS_SCORE:** 8", 8.0),
        ("- `PROCESS_SCORE`: **8.**", 8.0),
        ("PROCESS_SCORE = 7/10", 7.0),
        ("PROCESS_SCORE: 10 / 10", 10.0),
        ("PROCESS_SCORE: -3", 0.0),
        ("PROCESS_SCORE: 12", 10.0),
        ("PROCESS_SCORE: 1e1", 10.0),
        ("PROCESS_SCORE: 4\nPROCESS_SCORE: 4", 4.0),
        ("<think>PROCESS_SCORE: 2?</think>PROCESS_SCORE: 9", 9.0),
        # the template has put <think> into the prompt
        ("PROCESS_SCORE: 2?\n</think>\nPROCESS_SCORE: 9", 9.0),
        ("PROCESS_SCORE: 3\r\n", 3.0),
    ],
)
def test_process_score(reply: str, process: float) -> None:
    assert parse_verdict(reply) == {"process": process}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("", "no line PROCESS_SCORE"),
        ("I would give it a 7.", "no line PROCESS_SCORE"),
        ("The PROCESS_SCORE: 7", "no line PROCESS_SCORE"),
        ("process_score: 7", "no line PROCESS_SCORE"),
        ("<think>PROCESS_SCORE: 2", "no line PROCESS_SCORE"),
        ("PROCESS_SCORE: nan", "PROCESS_SCORE is 'nan', expected a number from 0 to 10"),
        ("PROCESS_SCORE: inf", "PROCESS_SCORE is 'inf'"),
        ("PROCESS_SCORE: 1e999", "PROCESS_SCORE is '1e999'"),
        ("PROCESS_SCORE: high", "PROCESS_SCORE is 'high'"),
        ("PROCESS_SCORE:", "PROCESS_SCORE is ''"),
        ("PROCESS_SCORE: 7 out of 10", "PROCESS_SCORE is '7 out of 10'"),
        ("PROCESS_SCORE: 7/20", "PROCESS_SCORE is '7/20'"),
        ("PROCESS_SCORE: 10\nPROCESS_SCORE: 2", "PROCESS_SCORE is both '10' and '2'"),
        (
            "PROCESS_SCORE: 7\nOUTCOME_SCORE: maybe",
            "OUTCOME_SCORE is 'maybe', expected a number from 0 to 1",
        ),
        ("PROCESS_SCORE: 7\nANSWER_CORRECT: yes", "ANSWER_CORRECT is 'yes', expected 0 or 1"),
    ],
)
def test_anything_else_is_malformed(reply: str, problem: str) -> None:
    with pytest.raises(MalformedVerdict) as caught:
        parse_verdict(reply)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [
        "6 x 7 is 42.\nOWN_ANSWER: 42\nThe output says 41.\nPROCESS_SCORE: 2",
        "**OWN_ANSWER:** 42\n**PROCESS_SCORE:** 2",
        "<think>PROCESS_SCORE: 9?</think>OWN_ANSWER = 42\nPROCESS_SCORE: 2",
        "OWN_ANSWER: 42\nOWN_ANSWER: 43\nPROCESS_SCORE: 2/10",
    ],
)
def test_a_score_after_an_answer_of_the_coach(reply: str) -> None:
    assert parse_verdict(reply, require_own_answer=True) == {"process": 2.0}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("PROCESS_SCORE: 9", "no line OWN_ANSWER with a result"),
        ("OWN_ANSWER:\nPROCESS_SCORE: 9", "no line OWN_ANSWER with a result"),
        ("OWN_ANSWER: **\nPROCESS_SCORE: 9", "no line OWN_ANSWER with a result"),
        ("My OWN_ANSWER: 42\nPROCESS_SCORE: 9", "no line OWN_ANSWER with a result"),
        ("<think>OWN_ANSWER: 42</think>PROCESS_SCORE: 9", "no line OWN_ANSWER with a result"),
        (
            "PROCESS_SCORE: 9\nOWN_ANSWER: 42",
            "the line OWN_ANSWER comes after PROCESS_SCORE, expected before",
        ),
        ("OWN_ANSWER: 42", "no line PROCESS_SCORE"),
    ],
)
def test_a_score_without_an_earlier_answer_is_malformed(reply: str, problem: str) -> None:
    with pytest.raises(MalformedVerdict) as caught:
        parse_verdict(reply, require_own_answer=True)
    assert str(caught.value) == problem


def test_optional_scores_by_the_names_that_turns_carry() -> None:
    verdict = parse_verdict("PROCESS_SCORE: 7\nOUTCOME_SCORE: 1.4\nANSWER_CORRECT: 0")
    assert verdict == {"process": 7.0, "outcome": 1.0, "answer_correct": 0.0}
    assert parse_verdict("PROCESS_SCORE: 0") == {"process": 0.0}
