"""Teams that answer in a box, played by canned replies: outcomes and local scores by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.orchestras import ORCHESTRAS
from rollout.orchestras.replies import parse_boxed_verdict, parse_review
from rollout.records.trajectory import Group, Status
from rollout.rewards.turn_scores import shaping
from tests.support.casts import SUM, grow, play, scores, speakers, validity

RIGHT, WRONG, NONE = "so \\boxed{7}", "so \\boxed{8}", "no idea"
DEBATE = {"debater_1": "debater", "debater_2": "debater", "debater_3": "debater"}
CHAIN = {"generator": "chain_generator", "verifier": "chain_verifier", "refiner": "chain_refiner"}
MIXTURE = {
    "proposer_1": "proposer",
    "proposer_2": "proposer",
    "proposer_3": "proposer",
    "aggregator": "aggregator",
}
REFINE = {
    "solver": "refine_solver",
    "verifier": "refine_verifier",
    "refiner": "refiner",
    "finalizer": "finalizer",
}
SELF = {"solver": "self_verifier"}
FINE = "<status>correct</status><feedback>it holds</feedback>"


def rewards(trajectory: Any, **options: Any) -> list[float | None]:
    return [
        turn.reward
        for turn in shaping(Group(task=SUM, trajectories=(trajectory,)), **options)
        .trajectories[0]
        .turns
    ]


def test_debate_is_decided_by_the_majority_of_the_last_round() -> None:
    trajectory, prompts = play(
        "debate", DEBATE, RIGHT, WRONG, WRONG, RIGHT, WRONG, "<think>8</think>so \\boxed{7.0}"
    )
    assert speakers(trajectory) == [*DEBATE, *DEBATE]
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")  # 7 and 7.0 are one answer
    assert scores(trajectory) == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert "[Solution" not in prompts[0]
    assert all(prompt.count("[Solution") == 3 for prompt in prompts[3:])
    # margin against the agent's own first answer: r + 0.5 (r - q)
    assert rewards(trajectory, history="own") == [1.0, 0.0, 0.0, 1.0, 0.0, 1.5]


def test_debate_of_equal_camps_goes_to_who_is_named_first() -> None:
    pair = dict.fromkeys(("a", "b"), "debater")
    trajectory, _ = play("debate", pair, WRONG, RIGHT, debaters=["a", "b"], rounds=1)
    assert (trajectory.outcome, trajectory.answer) == (0.0, "8")


def test_malformed_replies_have_no_vote_in_a_debate() -> None:
    trajectory, _ = play("debate", DEBATE, NONE, RIGHT, NONE, rounds=1)
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")
    assert validity(trajectory) == [False, True, False]
    assert scores(trajectory) == [0.0, 1.0, 0.0]
    nobody, _ = play("debate", DEBATE, NONE, NONE, NONE, rounds=1)
    assert (nobody.status, nobody.outcome, nobody.answer) == (Status.COMPLETED, 0.0, "")
    assert nobody.metrics == {"answered": 0.0}


def heard(prompt: str) -> list[str]:
    return [part.split("]\n")[1][0] for part in prompt.split("[Solution ")[1:]]


def test_debaters_hear_others_in_an_order_that_repeats() -> None:
    first = [f"{name} \\boxed{{7}}" for name in "abc"]
    _, prompts = play("debate", DEBATE, *first, RIGHT, RIGHT, RIGHT)
    orders = [heard(prompt) for prompt in prompts[3:]]
    assert [sorted(order) for order in orders] == [["a", "b", "c"]] * 3
    assert len({tuple(order) for order in orders}) > 1  # every listener's is its own
    again = play("debate", DEBATE, *first, RIGHT, RIGHT, RIGHT)[1]
    assert [heard(prompt) for prompt in again[3:]] == orders


def test_debaters_hear_no_more_than_they_may() -> None:
    first = [f"<think>secret</think>{name} \\boxed{{7}}" for name in "abc"]
    _, prompts = play("debate", DEBATE, *first, RIGHT, RIGHT, RIGHT, contain_self=False)
    assert [sorted(heard(prompt)) for prompt in prompts[3:]] == [["b", "c"], ["a", "c"], ["a", "b"]]
    assert not any("secret" in prompt for prompt in prompts)
    _, prompts = play("debate", DEBATE, *first, RIGHT, RIGHT, RIGHT, max_others=1)
    assert [len(heard(prompt)) for prompt in prompts[3:]] == [2, 2, 2]
    assert ["a" in heard(prompts[3]), "b" in heard(prompts[4]), "c" in heard(prompts[5])] == [
        True
    ] * 3


def test_a_debate_grows_as_a_tree_of_rounds() -> None:
    pair = dict.fromkeys(("a", "b"), "debater")
    replies = {
        ("a", 0, ""): WRONG, ("b", 1, ""): WRONG, ("a", 0, "1"): RIGHT, ("b", 1, "1"): WRONG,
        ("a", 2, "1.0"): WRONG, ("b", 3, "1.0"): WRONG, ("a", 2, "1.1"): RIGHT, ("b", 3, "1.1"): RIGHT,
    }  # fmt: skip
    trajectory = grow("debate", pair, replies, debaters=["a", "b"])
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, "")
    assert (trajectory.leaf, trajectory.outcome) == ("1.1", 1.0)
    assert {turn.node: turn.scores["branch"] for turn in trajectory.turns} == {
        "0": 0.0,
        "1": 1.0,
        "1.0": 0.0,
        "1.1": 3.0,
    }


def test_chain_hands_on_and_the_refiner_decides() -> None:
    trajectory, prompts = play(
        "chain", CHAIN, f"<think>hm</think>{WRONG}", "3+4 is not 8. \\boxed{0}", RIGHT
    )
    assert speakers(trajectory) == ["generator", "verifier", "refiner"]
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")
    assert scores(trajectory) == [0.0, 1.0, 1.0]  # the verdict is true
    assert f"# Solution\n{WRONG}\n" in prompts[1] and "hm" not in prompts[1]
    assert f"# Solution\n{WRONG}\n" in prompts[2] and "3+4 is not 8." in prompts[2]
    # quality: r + 0.5 (q r - (1-q)(1-r)), q = mean of those before: 0 / 0 / 0.5
    assert rewards(trajectory, history="before", formula="quality") == [0.0, 1.0, 1.25]


@pytest.mark.parametrize(
    ("replies", "local", "valid"),
    [
        ((RIGHT, "\\boxed{0}", RIGHT), [1.0, 0.0, 1.0], [True, True, True]),
        ((RIGHT, "\\boxed{1}", WRONG), [1.0, 1.0, 0.0], [True, True, True]),
        ((WRONG, "looks bad", RIGHT), [0.0, 0.0, 1.0], [True, False, True]),
        ((NONE, "\\boxed{0}", RIGHT), [0.0, 1.0, 1.0], [False, True, True]),
        ((RIGHT, "\\boxed{1}", NONE), [1.0, 1.0, 0.0], [True, True, False]),
    ],
    ids=["false alarm", "spoilt", "malformed verdict", "malformed solution", "malformed end"],
)
def test_chain_scores_and_malformed_replies(
    replies: tuple[str, str, str], local: list[float], valid: list[bool]
) -> None:
    trajectory, _ = play("chain", CHAIN, *replies)
    assert scores(trajectory) == local
    assert validity(trajectory) == valid
    assert trajectory.outcome == local[2]


def test_mixture_shows_every_proposal_to_the_aggregator() -> None:
    trajectory, prompts = play("mixture", MIXTURE, RIGHT, f"<think>x</think>{WRONG}", NONE, RIGHT)
    assert speakers(trajectory) == list(MIXTURE)
    assert f"[Solution 1]\n{RIGHT}\n\n[Solution 2]\n{WRONG}\n\n[Solution 3]\n{NONE}\n" in prompts[3]
    assert (trajectory.outcome, scores(trajectory)) == (1.0, [1.0, 0.0, 0.0, 1.0])
    assert validity(trajectory) == [True, True, False, True]
    assert rewards(trajectory, history="proposers") == [
        1.0,
        0.0,
        0.0,
        pytest.approx(1 + 0.5 * (1 - 1 / 3)),
    ]


def test_a_malformed_end_leaves_a_mixture_without_an_answer() -> None:
    trajectory, _ = play("mixture", MIXTURE, RIGHT, RIGHT, RIGHT, NONE)
    assert (trajectory.outcome, trajectory.answer, validity(trajectory)[3]) == (0.0, "", False)


@pytest.mark.parametrize(
    ("replies", "outcome"),
    [
        ((RIGHT, "again \\boxed{7.0}"), 1.0),
        ((WRONG, RIGHT, RIGHT), 1.0),
        ((WRONG, WRONG), 0.0),
        ((RIGHT, WRONG, RIGHT), 1.0),
        ((RIGHT, NONE, RIGHT), 1.0),
        ((NONE, NONE, NONE), 0.0),
        ((RIGHT, WRONG, NONE), 0.0),
    ],
    ids=[
        "stands",
        "mends",
        "stands wrongly",
        "wavers",
        "malformed confirms nothing",
        "never",
        "malformed end",
    ],
)
def test_self_verify_ends_when_it_stands_by_its_answer(
    replies: tuple[str, ...], outcome: float
) -> None:
    trajectory, prompts = play("self_verify", SELF, *replies)
    assert trajectory.outcome == outcome
    assert validity(trajectory) == ["boxed" in reply for reply in replies]
    assert scores(trajectory) == [float("7" in reply) for reply in replies]
    assert f"# Your solution so far\n{replies[0]}\n" in prompts[1]


def test_math_refine_passes_once_through_everybody() -> None:
    review = "<status>incorrect</status>\n<feedback>3+4 is 7</feedback>"
    trajectory, prompts = play("math_refine", REFINE, WRONG, f"secretly {review}", RIGHT, RIGHT)
    assert speakers(trajectory) == ["solver", "verifier", "refiner", "finalizer"]
    assert (trajectory.outcome, trajectory.answer) == (1.0, "7")
    assert scores(trajectory, "team") == [1.0] * 4
    assert (
        "# The verifier's finding\nincorrect\n3+4 is 7\n" in prompts[2]
        and "secretly" not in prompts[2]
    )
    assert f"# The refiner's solution\n{RIGHT}\n" in prompts[3]


def test_math_refine_withholds_a_malformed_finding_and_does_not_end_early() -> None:
    trajectory, prompts = play("math_refine", REFINE, RIGHT, "<status>fine</status>", RIGHT, NONE)
    assert validity(trajectory) == [True, False, True, False]
    assert "# The verifier's finding\n\n" in prompts[2]
    assert (trajectory.outcome, trajectory.answer) == (0.0, "")
    assert play("math_refine", REFINE, RIGHT, FINE, WRONG, RIGHT)[0].outcome == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (FINE, "correct\nit holds"),
        (f"<think><status>incorrect</status></think>{FINE}", "correct\nit holds"),
        ("<status>correct</status>", None),
        ("<status>right</status><feedback>f</feedback>", None),
        ("<status>correct</status><feedback></feedback>", None),
    ],
)
def test_review_needs_both_tags(text: str, value: str | None) -> None:
    assert parse_review(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("\\boxed{1}", "1"), ("\\boxed{0}", "0"), ("\\boxed{2}", None), ("1", None)]
)
def test_chain_verdict_is_a_boxed_bit(text: str, value: str | None) -> None:
    assert parse_boxed_verdict(text) == value


def test_a_world_that_cannot_grade_is_named() -> None:
    class Mute:
        def reset(self, task: object) -> str:
            return ""

        async def step(self, action: str) -> None:
            raise AssertionError

    trajectory, _ = play("chain", CHAIN, RIGHT, make_env=lambda _: Mute())  # type: ignore[arg-type, return-value]
    assert trajectory.status is Status.FAILED
    assert (
        trajectory.error
        == "EnvError: Mute cannot preview an action; use a team that does not ask for it"
    )


def test_the_table_names_them() -> None:
    assert {"chain", "debate", "mixture", "math_refine", "self_verify"} <= set(ORCHESTRAS)
