"""Stronger-MAS's allocation: each turn's own score, and a share of the team's reward for it."""

from __future__ import annotations

from collections import defaultdict

from rollout.records import Group, Trajectory, Turn
from rollout.rewards.allocation import allocate, check_option, local_score, score


def local_team(group: Group, *, alpha: float = 1.0, missing_local: str = "refuse") -> Group:
    """The group with a reward on every turn from its scores "local" and "team"; one whose local is undecided is masked.

    In a tree the team's part is what the branch's own round brought, by which branches are compared: the score
    "branch" less its turns' local ones, with the tree's alpha in it. "team" would not do there, as a step after the
    round credits only the branch that went on.

    Args:
        alpha: weight of the team's part.
        missing_local: `refuse`, or `zero` for agents that nobody scores by themselves.

    Raises:
        RewardError: a turn lacks a score, or an option is unknown.
    """
    check_option("missing_local", missing_local, ("refuse", "zero"))

    def local(trajectory: Trajectory, turn: Turn) -> float | None:
        if missing_local == "zero" and not {"local", "undecided"} & turn.scores.keys():
            return 0.0
        return local_score(trajectory, turn, "local")

    def rewards(trajectory: Trajectory) -> list[float | None]:
        together: dict[str, float] = defaultdict(float)  # local scores by node
        for turn in trajectory.turns:
            together[turn.node] += turn.scores.get("local", 0.0)
        paid: list[float | None] = []
        for turn in trajectory.turns:
            own = local(trajectory, turn)
            if turn.node:
                team = score(trajectory, turn, "branch") - together[turn.node]
            else:
                team = score(trajectory, turn, "team")
            # r_i = r_local + alpha r_team   Stronger-MAS (arXiv 2510.11062)
            paid.append(None if own is None else own + alpha * team)
        return paid

    return allocate(group, rewards)
