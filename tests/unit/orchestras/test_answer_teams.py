"""Orchestras whose agents answer in a box, on scripted replies."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.orchestras.replies import parse_boxed_verdict, parse_review
from rollout.records.trajectory import Group, Status, Trajectory
from rollout.rewards.turn_scores import shaping
from tests.support.casts import SUM, grow, play, scores, speakers, validity

RIGHT = "so \\boxed{7}"
WRONG = "so \\boxed{8}"
MALFORMED = "no idea"
DEBATE = dict.fromkeys(("debater_1", "debater_2", "debater_3"), "debater")
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
REVIEW = "<status>correct</status><feedback>it holds</feedback>"


def shaped_rewards(trajectory: Trajectory, **options: Any) -> list[float | None]:
    """Return the reward of every turn by the allocator `shaping`."""
    group = shaping(Group(task=SUM, trajectories=(trajectory,)), **options)
    return [turn.reward for turn in group.trajectories[0].turns]


def test_the_majority_of_the_last_round_decides_a_debate() -> None:
    trajectory, prompts = play(
        "debate", DEBATE, RIGHT, WRONG, WRONG, RIGHT, WRONG, "<think>8</think>so \\boxed{7.0}"
    )
    assert speakers(trajectory) == [*DEBATE, *DEBATE]
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"  # 7 and 7.0 are the same answer
    assert scores(trajectory) == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert "[Solution" not in prompts[0]
    assert all(prompt.count("[Solution") == 3 for prompt in prompts[3:])
    # margin to the agent's own first answer: r + 0.5 (r - q)
    assert shaped_rewards(trajectory, history="own") == [1.0, 0.0, 0.0, 1.0, 0.0, 1.5]


def test_the_first_debater_decides_between_equally_frequent_answers() -> None:
    roles = dict.fromkeys(("a", "b"), "debater")
    trajectory, _ = play("debate", roles, WRONG, RIGHT, debaters=["a", "b"], rounds=1)
    assert trajectory.outcome == 0.0
    assert trajectory.answer == "8"


def test_a_malformed_reply_does_not_vote() -> None:
    trajectory, _ = play("debate", DEBATE, MALFORMED, RIGHT, MALFORMED, rounds=1)
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"
    assert validity(trajectory) == [False, True, False]
    assert scores(trajectory) == [0.0, 1.0, 0.0]


def test_a_debate_without_votes_has_no_answer() -> None:
    trajectory, _ = play("debate", DEBATE, MALFORMED, MALFORMED, MALFORMED, rounds=1)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""
    assert trajectory.metrics == {"answered": 0.0}


# The first letter of a reply in the first round identifies its debater.
FIRST_ROUND = [f"<think>secret</think>{letter} \\boxed{{7}}" for letter in "abc"]


def debate_prompts(**options: Any) -> list[str]:
    """Return the prompts of the second round, after the replies of FIRST_ROUND."""
    _, prompts = play("debate", DEBATE, *FIRST_ROUND, RIGHT, RIGHT, RIGHT, **options)
    return prompts[3:]


def letters_read(prompt: str) -> list[str]:
    """Return the letters of the replies that a prompt shows, in their order."""
    solutions = prompt.split("[Solution ")[1:]
    return [solution.split("]\n")[1][0] for solution in solutions]


def test_the_order_of_replies_differs_between_debaters_and_is_reproducible() -> None:
    orders = [letters_read(prompt) for prompt in debate_prompts()]
    assert [sorted(order) for order in orders] == [["a", "b", "c"]] * 3
    assert len({tuple(order) for order in orders}) > 1
    assert [letters_read(prompt) for prompt in debate_prompts()] == orders


def test_debaters_may_read_only_the_replies_of_others() -> None:
    prompts = debate_prompts(contain_self=False)
    letters = [sorted(letters_read(prompt)) for prompt in prompts]
    assert letters == [["b", "c"], ["a", "c"], ["a", "b"]]
    assert not any("secret" in prompt for prompt in prompts)


def test_max_others_limits_the_replies_of_others() -> None:
    for letter, prompt in zip("abc", debate_prompts(max_others=1), strict=True):
        letters = letters_read(prompt)
        assert len(letters) == 2
        assert letter in letters


def test_a_debate_grows_a_tree_of_rounds() -> None:
    roles = dict.fromkeys(("a", "b"), "debater")
    replies = {
        ("a", 0, ""): WRONG, ("b", 1, ""): WRONG,
        ("a", 0, "1"): RIGHT, ("b", 1, "1"): WRONG,
        ("a", 2, "1.0"): WRONG, ("b", 3, "1.0"): WRONG,
        ("a", 2, "1.1"): RIGHT, ("b", 3, "1.1"): RIGHT,
    }  # fmt: skip
    trajectory = grow("debate", roles, replies, debaters=["a", "b"])
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, "")
    assert trajectory.leaf == "1.1"
    assert trajectory.outcome == 1.0
    branch_scores = {turn.node: turn.scores["branch"] for turn in trajectory.turns}
    assert branch_scores == {"0": 0.0, "1": 1.0, "1.0": 0.0, "1.1": 3.0}


def test_in_a_chain_each_agent_reads_the_agents_before_and_the_refiner_decides() -> None:
    trajectory, prompts = play(
        "chain", CHAIN, f"<think>hm</think>{WRONG}", "3+4 is not 8. \\boxed{0}", RIGHT
    )
    assert speakers(trajectory) == ["generator", "verifier", "refiner"]
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"
    assert scores(trajectory) == [0.0, 1.0, 1.0]  # the verdict is right
    assert f"# Solution\n{WRONG}\n" in prompts[1]
    assert "hm" not in prompts[1]
    assert f"# Solution\n{WRONG}\n" in prompts[2]
    assert "3+4 is not 8." in prompts[2]
    # quality: r + 0.5 (q r - (1-q)(1-r)), where q, the mean of the turns before, is 0, 0 and 0.5
    assert shaped_rewards(trajectory, history="before", formula="quality") == [0.0, 1.0, 1.25]


@pytest.mark.parametrize(
    ("replies", "local", "valid"),
    [
        ((RIGHT, "\\boxed{0}", RIGHT), [1.0, 0.0, 1.0], [True, True, True]),
        ((RIGHT, "\\boxed{1}", WRONG), [1.0, 1.0, 0.0], [True, True, True]),
        ((WRONG, "looks bad", RIGHT), [0.0, 0.0, 1.0], [True, False, True]),
        ((MALFORMED, "\\boxed{0}", RIGHT), [0.0, 1.0, 1.0], [False, True, True]),
        ((RIGHT, "\\boxed{1}", MALFORMED), [1.0, 1.0, 0.0], [True, True, False]),
    ],
    ids=[
        "false alarm",
        "worse refinement",
        "malformed verdict",
        "malformed solution",
        "malformed refinement",
    ],
)
def test_local_scores_of_a_chain(
    replies: tuple[str, str, str], local: list[float], valid: list[bool]
) -> None:
    trajectory, _ = play("chain", CHAIN, *replies)
    assert scores(trajectory) == local
    assert validity(trajectory) == valid
    assert trajectory.outcome == local[2]


def test_the_aggregator_of_a_mixture_reads_every_proposal() -> None:
    trajectory, prompts = play(
        "mixture", MIXTURE, RIGHT, f"<think>x</think>{WRONG}", MALFORMED, RIGHT
    )
    assert speakers(trajectory) == list(MIXTURE)
    proposals = f"[Solution 1]\n{RIGHT}\n\n[Solution 2]\n{WRONG}\n\n[Solution 3]\n{MALFORMED}\n"
    assert proposals in prompts[3]
    assert trajectory.outcome == 1.0
    assert scores(trajectory) == [1.0, 0.0, 0.0, 1.0]
    assert validity(trajectory) == [True, True, False, True]
    aggregator_reward = 1 + 0.5 * (1 - 1 / 3)
    rewards = shaped_rewards(trajectory, history="proposers")
    assert rewards == [1.0, 0.0, 0.0, pytest.approx(aggregator_reward)]


def test_a_malformed_last_reply_leaves_a_mixture_without_an_answer() -> None:
    trajectory, _ = play("mixture", MIXTURE, RIGHT, RIGHT, RIGHT, MALFORMED)
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""
    assert validity(trajectory) == [True, True, True, False]


@pytest.mark.parametrize(
    ("replies", "outcome"),
    [
        ((RIGHT, "again \\boxed{7.0}"), 1.0),
        ((WRONG, RIGHT, RIGHT), 1.0),
        ((WRONG, WRONG), 0.0),
        ((RIGHT, WRONG, RIGHT), 1.0),
        ((RIGHT, MALFORMED, RIGHT), 1.0),
        ((MALFORMED, MALFORMED, MALFORMED), 0.0),
        ((RIGHT, WRONG, MALFORMED), 0.0),
    ],
    ids=[
        "confirmed",
        "corrected and confirmed",
        "mistake confirmed",
        "changed twice",
        "malformed reply confirms nothing",
        "no answer",
        "malformed last reply",
    ],
)
def test_self_verify_ends_when_an_answer_is_confirmed(
    replies: tuple[str, ...], outcome: float
) -> None:
    trajectory, prompts = play("self_verify", {"solver": "self_verifier"}, *replies)
    assert trajectory.outcome == outcome
    assert validity(trajectory) == ["boxed" in reply for reply in replies]
    assert scores(trajectory) == [float("7" in reply) for reply in replies]
    assert f"# Your solution so far\n{replies[0]}\n" in prompts[1]


def test_math_refine_asks_each_agent_once() -> None:
    review = "<status>incorrect</status>\n<feedback>3+4 is 7</feedback>"
    trajectory, prompts = play("math_refine", REFINE, WRONG, f"secretly {review}", RIGHT, RIGHT)
    assert speakers(trajectory) == ["solver", "verifier", "refiner", "finalizer"]
    assert trajectory.outcome == 1.0
    assert trajectory.answer == "7"
    assert scores(trajectory, "team") == [1.0] * 4
    assert "# The verifier's finding\nincorrect\n3+4 is 7\n" in prompts[2]
    assert "secretly" not in prompts[2]
    assert f"# The refiner's solution\n{RIGHT}\n" in prompts[3]


def test_math_refine_continues_without_a_malformed_review() -> None:
    trajectory, prompts = play(
        "math_refine", REFINE, RIGHT, "<status>fine</status>", RIGHT, MALFORMED
    )
    assert validity(trajectory) == [True, False, True, False]
    assert "# The verifier's finding\n\n" in prompts[2]
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""


def test_math_refine_continues_after_an_approval() -> None:
    trajectory, _ = play("math_refine", REFINE, RIGHT, REVIEW, WRONG, RIGHT)
    assert trajectory.outcome == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (REVIEW, "correct\nit holds"),
        (f"<think><status>incorrect</status></think>{REVIEW}", "correct\nit holds"),
        ("<status>correct</status>", None),
        ("<status>right</status><feedback>f</feedback>", None),
        ("<status>correct</status><feedback></feedback>", None),
    ],
)
def test_parse_review_needs_both_tags(text: str, value: str | None) -> None:
    assert parse_review(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("\\boxed{1}", "1"), ("\\boxed{0}", "0"), ("\\boxed{2}", None), ("1", None)]
)
def test_parse_boxed_verdict(text: str, value: str | None) -> None:
    assert parse_boxed_verdict(text) == value


def test_an_environment_that_cannot_preview_is_named() -> None:
    class NoPreview:
        def reset(self, task: object) -> str:
            return ""

        async def step(self, action: str) -> None:
            raise AssertionError("the orchestra fails before a step")

    trajectory, _ = play("chain", CHAIN, RIGHT, make_env=lambda _: NoPreview())  # type: ignore[arg-type, return-value]
    assert trajectory.status is Status.FAILED
    expected = (
        "EnvError: environment 'math' cannot preview an action; use a team that does not ask for it"
    )
    assert trajectory.error == expected
