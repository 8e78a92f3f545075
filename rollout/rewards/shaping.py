"""MARTI's reward shaping: a turn's score, more where it is better than what was said before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rollout.records import Group, Trajectory, Turn
from rollout.rewards.allocation import allocate, check_option, local_score, rounds, unbranched

# Delta(R, Q)   MARTI (ICLR 2026), auto_reward_alloc.py
FORMULAS: dict[str, Callable[[float, float], float]] = {
    "margin": lambda r, q: r - q,
    "quality": lambda r, q: q * r - (1 - q) * (1 - r),  # R and Q in [0, 1]
}


def _own(turns: Sequence[Turn], i: int) -> list[int]:
    return [j for j in range(i) if turns[j].agent == turns[i].agent]


def _rounds(turns: Sequence[Turn], i: int) -> list[int]:
    number = rounds(turns)
    return [j for j in range(len(turns)) if number[j] < number[i]]


def _before(turns: Sequence[Turn], i: int) -> list[int]:
    return list(range(i))


def _proposers(turns: Sequence[Turn], i: int) -> list[int]:
    return [j for j in range(i) if turns[j].agent != turns[i].agent] if i == len(turns) - 1 else []


# which turns' mean score is Q
HISTORIES: dict[str, Callable[[Sequence[Turn], int], list[int]]] = {
    "own": _own,  # the agent's own earlier turns (MARTI's debate class)
    "rounds": _rounds,  # all agents' turns of earlier rounds (debate in its generic class)
    "before": _before,  # every turn before (chain)
    "proposers": _proposers,  # the last turn against all other agents'; the others' turns stay (mixture of agents)
}
_BY_AGENT = ("own", "rounds")  # forms in which each agent has its own last score


def shaping(
    group: Group,
    *,
    measure: str = "local",
    formula: str = "margin",
    history: str = "own",
    alpha: float = 0.5,
    beta: float = 0.0,
) -> Group:
    """The group with every turn's score shaped by the mean Q of earlier scores; a turn without earlier ones keeps its.

    A turn whose score, or with beta whose last score, is undecided is masked; Q is the mean of the others.

    Args:
        measure: name of the score R, "local" or one of the environment's metrics.
        formula: `margin`, R - Q; or `quality`, QR - (1-Q)(1-R).
        history: whose scores Q averages, a key of HISTORIES; always the scores as measured, not as shaped.
        alpha: weight of the formula.
        beta: weight of the last score, added to every turn (0.5 in MARTI's `*_with_outcome`): the agent's own last
            score for `own` and `rounds`, the trajectory's for `before` and `proposers`.

    Raises:
        RewardError: a turn has no such score, a trajectory is a tree, or an option is unknown.
    """
    check_option("formula", formula, FORMULAS)
    check_option("history", history, HISTORIES)

    def rewards(trajectory: Trajectory) -> list[float | None]:
        turns = unbranched(trajectory).turns
        raw = [local_score(trajectory, turn, measure) for turn in turns]
        last = dict(zip((turn.agent for turn in turns), raw, strict=True))
        shaped: list[float | None] = []
        for i, (turn, value) in enumerate(zip(turns, raw, strict=True)):
            final = (last[turn.agent] if history in _BY_AGENT else raw[-1]) if beta else 0.0
            if value is None or final is None:
                shaped.append(None)
                continue
            earlier = [q for j in HISTORIES[history](turns, i) if (q := raw[j]) is not None]
            # r = R + alpha Delta(R, Q) + beta R_last
            delta = FORMULAS[formula](value, fmean(earlier)) if earlier else 0.0
            shaped.append(value + alpha * delta + beta * final)
        return shaped

    return allocate(group, rewards)
