"""Penalties of a turn, and how they meet the allocator's reward."""

from functools import partial

import pytest

from rollout.config.agents import AgentConfig
from rollout.config.reward import RewardConfig, build_allocator
from rollout.rewards import penalties as package
from rollout.rewards.allocation import RewardError
from rollout.rewards.penalties import (
    PENALTIES,
    apply_penalties,
    invalid_reply,
    mask_truncated,
    overlong,
)
from tests.support.played import failed, group, rewards, trajectory, turn

AGENTS = {
    "solver": AgentConfig(policy="p", max_tokens=10),
    "verifier": AgentConfig(policy="p", max_tokens=6),
}


def says(tokens, agent="solver", **fields):
    return turn(0, agent, completion_ids=(2,) * tokens, **fields)


def test_a_malformed_reply_costs():
    assert invalid_reply(turn(0)) == 0.0
    assert invalid_reply(turn(0, valid=False)) == -1.0
    assert invalid_reply(turn(0, valid=False), coef=0.1) == -0.1


@pytest.mark.parametrize(
    ("text", "chinese", "thought"),
    [
        ("<think>so</think> <answer>Rome</answer>", 0.0, 0.0),
        ("<think>so</think> <answer>罗马</answer>", -0.1, 0.0),
        ("<answer>Rome</answer>", 0.0, -0.1),
        ("<think>so</think> <think>and</think> Rome", 0.0, -0.1),
        ("so</think> Rome <think>", 0.0, -0.1),
        ("<think>so 罗", -0.1, -0.1),
    ],
)
def test_a_reply_that_breaks_a_rule_of_its_agent_costs(text, chinese, thought):
    for rule, cost in (("no_chinese", chinese), ("one_thought", thought)):
        assert invalid_reply(turn(0, text=text), coef=0.1, rules={"solver": [rule]}) == cost
    assert (
        invalid_reply(
            turn(0, text=text), coef=0.1, rules={"verifier": ["no_chinese", "one_thought"]}
        )
        == 0.0
    )
    assert (
        invalid_reply(turn(0, text=text, valid=False), coef=0.1, rules={"solver": ["no_chinese"]})
        == -0.1
    )


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (13, -1.0)]
)
def test_the_last_tokens_before_the_limit_cost(tokens, expected):
    assert overlong(says(tokens), buffer=4, max_tokens={"solver": 10}) == expected
    assert overlong(says(tokens), buffer=4, max_tokens={"solver": 10}, coef=0.5) == expected / 2


@pytest.mark.parametrize(("buffer", "limits"), [(4, {}), (4, None), (11, {"solver": 10})])
def test_a_limit_that_cannot_be_is_named(buffer, limits):
    with pytest.raises(
        RewardError, match=r"max_tokens of agent 'solver' is .* expected buffer <= max_tokens"
    ):
        overlong(says(1), buffer=buffer, max_tokens=limits)


def test_a_reply_that_was_cut_off_is_masked():
    assert mask_truncated(turn(0)) == 0.0
    assert mask_truncated(turn(0, finish_reason="length")) is None


def test_penalties_add_up_after_the_allocator():
    played = trajectory(
        turn(0, reward=1.0),
        turn(1, reward=1.0, valid=False),
        turn(2, reward=0.0, valid=False, completion_ids=(2,) * 8),
        turn(3, reward=1.0, finish_reason="length", valid=False),
        turn(4, reward=None, masked=True, valid=False),
    )
    both = [
        partial(invalid_reply, coef=0.1),
        partial(overlong, buffer=4, max_tokens={"solver": 10}),
        mask_truncated,
    ]
    charged = apply_penalties(group(played, failed(turn(0, valid=False), sample=1)), both)
    # what was cut off keeps its reward for its peers, and does not train
    assert rewards(charged) == [[1.0, 0.9, -0.6, 0.9, None], [None]]
    assert [t.scores.get("penalty") for t in charged.trajectories[0].turns] == pytest.approx(
        [None, -0.1, -0.6, -0.1, None]
    )
    assert [t.masked for t in charged.trajectories[0].turns] == [False, False, False, True, True]


def test_an_allocator_that_forgets_a_turn_is_caught():
    with pytest.raises(
        RewardError, match=r"trajectory 0/t/0, turn 1 \(b\): the allocator set no reward"
    ):
        apply_penalties(group(trajectory(turn(0, reward=1.0), turn(1, "b"))), [])
    with pytest.raises(RewardError, match=r"turn 0 \(solver\): reward is nan"):
        apply_penalties(group(trajectory(turn(0, reward=float("nan")))), [])


@pytest.mark.parametrize("overlong_options", [{"buffer": 4}, {"buffer": 4, "max_tokens": None}])
def test_a_run_allocates_and_penalises_with_its_agents_limits(overlong_options):
    config = RewardConfig(
        name="shared_outcome", penalties={"invalid": {"coef": 0.25}, "overlong": overlong_options}
    )
    played = group(
        trajectory(
            says(8), says(4, "verifier"), says(1, valid=False), outcome=0.5
        )  # limits 10 and 6
    )
    assert rewards(build_allocator(config, AGENTS)(played)) == [[0.0, 0.0, 0.25]]
    with_limit = RewardConfig(
        name="shared_outcome", penalties={"overlong": {"buffer": 4, "max_tokens": {"solver": 12}}}
    )
    assert rewards(build_allocator(with_limit, AGENTS)(played)) == [[0.5, 0.0, 0.5]]


def test_a_penalty_by_import_path():
    config = RewardConfig(name="shared_outcome", penalties={f"{__name__}:terse": {"least": 3}})
    played = group(trajectory(says(2), says(3)))
    assert rewards(build_allocator(config, AGENTS)(played)) == [[0.0, 1.0]]


def test_a_penalty_of_the_user_has_a_max_tokens_of_its_own():
    config = RewardConfig(
        name="shared_outcome", penalties={f"{__name__}:bounded": {"max_tokens": 3}}
    )
    played = group(trajectory(says(3), says(4)))
    assert rewards(build_allocator(config, AGENTS)(played)) == [[1.0, 0.0]]


def bounded(turn, *, max_tokens: int):
    return -1.0 if len(turn.completion_ids) > max_tokens else 0.0


def terse(turn, *, least):
    return -1.0 if len(turn.completion_ids) < least else 0.0


def test_every_penalty_is_documented():
    assert all(
        f"\n{name} " in str(package.__doc__) and PENALTIES[name].__doc__ for name in PENALTIES
    )
