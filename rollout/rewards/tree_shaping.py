"""MARS2's tree shaping: a branch's score, more where it beats its parent and its siblings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from rollout.records import Group, Trajectory
from rollout.rewards.allocation import RewardError, allocate, local_score, place


def tree_shaping(group: Group, *, measure: str = "local", gamma: float = 0.3, mix: float = 0.5) -> Group:
    """The group with every turn's score shaped by its node's place in its trajectory's tree.

    A node's value is the mean score of its turns; a turn whose score is undecided is masked, and in no mean. Values are
    as measured throughout, whatever the order of the turns; a node with neither parent nor siblings keeps its score.

    Args:
        measure: name of the score r.
        gamma: weight of what a turn has over its baseline.
        mix: λ, the siblings' part of the baseline; the parent has the rest. Who is alone has all of it.

    Raises:
        RewardError: a turn has no such score, or a trajectory is no tree.
    """

    def rewards(trajectory: Trajectory) -> list[float | None]:
        if not any(turn.node for turn in trajectory.turns):
            raise RewardError(f"{place(trajectory)}: no tree, none of its turns has a node; sample trees to shape them")
        raw = [local_score(trajectory, turn, measure) for turn in trajectory.turns]
        scores: dict[str, list[float]] = defaultdict(list)
        for turn, value in zip(trajectory.turns, raw, strict=True):
            if value is not None:
                scores[turn.node].append(value)
        values = {node: fmean(own) for node, own in scores.items()}
        shaped: list[float | None] = []
        for turn, value in zip(trajectory.turns, raw, strict=True):
            if value is None:
                shaped.append(None)
                continue
            # r + gamma (r - baseline)   MARTI (ICLR 2026), ab_mcts_processor.py
            baseline = _baseline(turn.node, values, mix)
            shaped.append(value if baseline is None else value + gamma * (value - baseline))
        return shaped

    return allocate(group, rewards)


def _baseline(node: str, values: Mapping[str, float], mix: float) -> float | None:
    if not node:  # turns before the first branching
        return None
    parent = node.rpartition(".")[0]
    above = values.get(parent)
    others = (other for other in values if other not in ("", node))
    beside = [values[other] for other in others if other.rpartition(".")[0] == parent]
    siblings = fmean(beside) if beside else None
    # baseline = (1 - lambda) parent + lambda leave-one-out mean of the siblings
    if above is not None and siblings is not None:
        return (1 - mix) * above + mix * siblings
    return siblings if above is None else above
