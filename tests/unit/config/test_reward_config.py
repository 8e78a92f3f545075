"""Choices of reward: what a config may say, and import paths where names are."""

import pytest
from pydantic import ValidationError

from rollout.base.lookup import UnknownName, lookup
from rollout.config.reward import RewardConfig, build_allocator
from rollout.rewards import ALLOCATORS
from rollout.rewards.allocation import shared_outcome
from tests.support.played import group, rewards, trajectory, turn

TEAM = ("searcher", "answerer")
REWARDS = "rollout.rewards"


def halved(group, *, share=0.5):
    return ALLOCATORS["shares"](group, weights={"solver": share})


NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "shared_outcome", "options": {"alpha": 1}},
            "reward 'shared_outcome' has no option 'alpha'",
        ),
        (
            {"name": "turn_difference", "options": {"metric": "f1"}},
            "reward 'turn_difference' needs option 'scored'",
        ),
        (
            {"name": "shaping", "options": {"formula": "best"}},
            "Input should be 'margin' or 'quality'",
        ),
        (
            {"name": "shares", "options": {"weights": 3}},
            "Input should be an object",
        ),
        (
            {"name": "shares", "penalties": {"invalid": {"cost": 1}}},
            "penalty 'invalid' has no option 'cost'",
        ),
        (
            {"name": "shares", "penalties": {"overlong": {}}},
            "penalty 'overlong' needs option 'buffer'",
        ),
        ({"name": f"{__name__}:NOT_CALLABLE"}, "must take (group, *, ...); it is of type int"),
        (
            {"name": f"{__name__}:halved", "options": {"part": 1}},
            "has no option 'part'; its options: share",
        ),
    ],
)
def test_a_mistaken_choice_is_refused_before_anything_runs(values, message):
    with pytest.raises(ValidationError) as caught:
        RewardConfig(**values)
    assert message in caught.value.errors()[0]["msg"]


def test_unknown_names_are_named_with_what_is_known():
    with pytest.raises(
        ValidationError, match="unknown reward 'shared'; nearest: shares; known: coach, discounts"
    ):
        RewardConfig(name="shared")
    with pytest.raises(
        ValidationError, match="unknown penalty 'late'; known: invalid, mask_truncated, overlong"
    ):
        RewardConfig(name="shares", penalties={"late": {}})


def test_an_import_path_stands_for_a_name():
    config = RewardConfig(name=f"{__name__}:halved", options={"share": 0.25})
    assert rewards(build_allocator(config, {})(group(trajectory(turn(0))))) == [[0.25]]
    assert lookup("reward", f"{REWARDS}.allocation:shared_outcome", ALLOCATORS) is shared_outcome


@pytest.mark.parametrize(
    "path", ["nowhere:x", f"{REWARDS}:no_such", ":x", ".rewards:x", f"{REWARDS}:"]
)
def test_an_import_path_that_leads_nowhere_is_one_line(path):
    with pytest.raises(UnknownName, match=f"^reward '{path}' cannot be imported: ") as caught:
        lookup("reward", path, ALLOCATORS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "shares", "options": {"weights": {"serchr": 1}}},
            "reward 'shares': weights names agent 'serchr'",
        ),
        (
            {
                "name": "turn_difference",
                "options": {"metric": "f1", "scored": ["answerer", "reader"]},
            },
            "scored names agent 'reader', who is not in the team; agents: searcher, answerer",
        ),
        (
            {
                "name": "shares",
                "penalties": {"overlong": {"buffer": 4, "max_tokens": {"reader": 9}}},
            },
            "penalty 'overlong': max_tokens names agent 'reader'",
        ),
    ],
)
def test_an_agent_who_is_not_there_is_named(values, message):
    with pytest.raises(ValueError, match="names agent") as caught:
        RewardConfig(**values).check_agents(TEAM)
    assert message in str(caught.value)


def test_options_that_name_nobody_fit_any_team():
    RewardConfig(name="coach", options={"clip": [0, 10], "scale": 0.1}).check_agents(TEAM)
    RewardConfig(name="shares", options={"weights": {"searcher": 1}}).check_agents(TEAM)
