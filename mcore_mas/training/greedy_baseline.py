"""Greedy baseline of ReMax (arXiv 2310.10505): a trajectory at temperature 0 of each task."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from rollout.records.trajectory import Group, Status, Trajectory, Turn


def append_greedy(groups: Sequence[Group], greedy_groups: Sequence[Group]) -> list[Group]:
    """Append each task's greedy trajectory to its group, so that it is rewarded like the others."""
    return [
        replace(group, trajectories=group.trajectories + greedy.trajectories)
        for group, greedy in zip(groups, greedy_groups, strict=True)
    ]


def use_greedy_as_baseline(group: Group) -> Group:
    """Remove the greedy trajectory of a group, and set the score `greedy` of all other turns.

    The score is the mean reward of the same agent's turns in the greedy trajectory. If the agent has
    no reward there, it is the mean reward of all agents' turns, or else the outcome. If the greedy
    trajectory failed, the others count as failed too, because they cannot be trained without a
    baseline.

    Args:
        group: group with rewards; its last trajectory is the greedy one.
    """
    *sampled, greedy = group.trajectories
    if greedy.status is not Status.COMPLETED:
        return replace(group, trajectories=tuple(_fail_trajectories(sampled, greedy)))

    rewards_by_agent: dict[str, list[float]] = defaultdict(list)
    for turn in greedy.turns:
        if turn.reward is not None:
            rewards_by_agent[turn.agent].append(turn.reward)
    all_rewards = [reward for rewards in rewards_by_agent.values() for reward in rewards]
    overall_mean = fmean(all_rewards) if all_rewards else greedy.outcome or 0.0
    mean_by_agent = {agent: fmean(rewards) for agent, rewards in rewards_by_agent.items()}

    def with_score(turn: Turn) -> Turn:
        baseline = mean_by_agent.get(turn.agent, overall_mean)
        return replace(turn, scores={**turn.scores, "greedy": baseline})

    scored = []
    for trajectory in sampled:
        turns = tuple(with_score(turn) for turn in trajectory.turns)
        scored.append(replace(trajectory, turns=turns))
    return replace(group, trajectories=tuple(scored))


def _fail_trajectories(trajectories: Sequence[Trajectory], greedy: Trajectory) -> list[Trajectory]:
    """Return the trajectories as failed, because their greedy trajectory failed.

    Trajectories that have an error already keep it.
    """
    error = f"no greedy baseline: {greedy.error}"
    return [
        trajectory if trajectory.error else replace(trajectory, status=greedy.status, error=error)
        for trajectory in trajectories
    ]
