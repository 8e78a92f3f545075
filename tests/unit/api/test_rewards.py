"""Functions of a trajectory become allocators of rewards."""

import operator

import pytest

from mcore_mas.api.rewards import allocator_of
from rollout.rewards.allocation import RewardError, shared_outcome
from tests.support.played import group, trajectory, turn

PLAYED = group(
    trajectory(turn(0, "writer"), turn(1, "editor"), outcome=1.0),
    trajectory(turn(0, "writer"), error="no"),
)


def test_a_number_is_the_reward_of_every_turn() -> None:
    allocated = allocator_of(lambda trajectory: 3)(PLAYED)
    assert [turn.reward for turn in allocated.trajectories[0].turns] == [3.0, 3.0]


def test_a_number_for_each_agent_is_the_reward_of_its_turns() -> None:
    allocated = allocator_of(lambda t: {"writer": 1, "editor": len(t.turns)})(PLAYED)
    assert [turn.reward for turn in allocated.trajectories[0].turns] == [1.0, 2.0]


def test_a_function_of_a_group_is_an_allocator() -> None:
    assert allocator_of(shared_outcome) is shared_outcome


def test_a_reward_may_be_written_in_c() -> None:
    allocated = allocator_of(operator.attrgetter("outcome"))(
        group(trajectory(turn(0), outcome=0.5))
    )
    assert allocated.trajectories[0].turns[0].reward == 0.5


@pytest.mark.parametrize("result", [None, {"writer": 1.0}, "much"])
def test_a_reward_that_is_no_number_is_refused(result: object) -> None:
    def worth(trajectory):
        return result

    message = r"^trajectory \S+: reward worth returned .* for a turn of agent 'editor'; expected a"
    with pytest.raises(RewardError, match=message):
        allocator_of(worth)(group(trajectory(turn(0, "editor"))))


def test_an_error_of_a_reward_names_the_trajectory_the_file_and_the_line() -> None:
    def worth(trajectory):
        return 1 / len(trajectory.trained_by)

    played = group(trajectory(turn(0, "editor")))
    with pytest.raises(RewardError) as caught:
        allocator_of(worth)(played)
    line = worth.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"trajectory {played.trajectories[0].id}: reward worth raised AttributeError: 'Trajectory' "
        f"object has no attribute 'trained_by' (test_rewards.py:{line})"
    )
