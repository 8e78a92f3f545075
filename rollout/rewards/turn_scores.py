"""Turn-level rewards from single turns' scores: local and team, differences, MARTI's shaping, and a coach's."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import AfterValidator

from rollout.base.options import Names, Share
from rollout.records.trajectory import Group, Trajectory, Turn
from rollout.rewards import allocation
from rollout.rewards.allocation import RewardError, allocate, locate


def local_team(
    group: Group, *, alpha: float = 1.0, missing_local: Literal["refuse", "zero"] = "refuse"
) -> Group:
    """The group with a reward on every turn from its scores "local" and "team"; one whose local is undecided is masked.

    In a tree the team's part is what the branch's own round brought, by which branches are compared: the score
    "branch" less its turns' local ones, with the tree's alpha in it. "team" would not do there, as a step after the
    round credits only the branch that went on.

    Args:
        alpha: weight of the team's part.
        missing_local: `refuse`, or `zero` for agents that nobody scores by themselves.
    """

    def local(trajectory: Trajectory, turn: Turn) -> float | None:
        if missing_local == "zero" and not {"local", "undecided"} & turn.scores.keys():
            return 0.0
        return allocation.local_score(trajectory, turn, "local")

    def rewards(trajectory: Trajectory) -> list[float | None]:
        together: dict[str, float] = defaultdict(float)  # local scores by node
        for turn in trajectory.turns:
            together[turn.node] += turn.scores.get("local", 0.0)
        paid: list[float | None] = []
        for turn in trajectory.turns:
            own = local(trajectory, turn)
            if turn.node:
                team = allocation.score_of(trajectory, turn, "branch") - together[turn.node]
            else:
                team = allocation.score_of(trajectory, turn, "team")
            # r_i = r_local + alpha r_team   Stronger-MAS (arXiv 2510.11062)
            paid.append(None if own is None else own + alpha * team)
        return paid

    return allocate(group, rewards)


def turn_difference(
    group: Group, *, metric: str, scored: Names, absolute: Sequence[str] = ()
) -> Group:
    """The group with every turn rewarded by how its round changed `metric`.

    A round ends with a turn of an agent in `scored`, and its f is that turn's score `metric`. So whoever speaks
    between two measurements gets what the second has over the first: a searcher before the answer, and a reflector
    after the code that it reflects on and before the next. Turns after the last measurement changed nothing and get
    0: a search that ends the search, a reflection that nobody reads.

    Args:
        metric: name of the score f, such as "token_f1" or "pass_rate".
        scored: agents on whose replies the environment measures f.
        absolute: agents who get f itself, in every round.

    Raises:
        RewardError: a turn in `scored` has no such score, a turn has another value than its round, an agent in
            `absolute` spoke after the last measurement, or a trajectory is a tree.
    """

    def rewards(trajectory: Trajectory) -> list[float]:
        paid: list[float] = []
        previous = 0.0
        for i, turn in enumerate(allocation.unbranched(trajectory).turns):
            if turn.agent in scored:
                value = allocation.score_of(trajectory, turn, metric)
                for member in trajectory.turns[len(paid) : i + 1]:
                    if member.scores.get(metric, value) != value:
                        raise RewardError(
                            f"{locate(trajectory, member)}: '{metric}' is {member.scores[metric]}, but the round's "
                            f"is {value}, of turn {turn.index} ({turn.agent}); name in scored who was measured"
                        )
                    # r = f_t for absolute roles, else f_t - f_{t-1} with f_{-1} = 0   UnityMAS-O (arXiv 2605.26646)
                    paid.append(value if member.agent in absolute else value - previous)
                previous = value
        for turn in trajectory.turns[len(paid) :]:
            if turn.agent in absolute:
                raise RewardError(
                    f"{locate(trajectory, turn)}: '{metric}' is not measured on it or after it"
                )
            paid.append(0.0)
        return paid

    return allocate(group, rewards)


Formula = Literal["margin", "quality"]
# Delta(R, Q)   MARTI (ICLR 2026), auto_reward_alloc.py
FORMULAS: dict[Formula, Callable[[float, float], float]] = {
    "margin": lambda r, q: r - q,
    "quality": lambda r, q: q * r - (1 - q) * (1 - r),  # R and Q in [0, 1]
}


def _rounds(turns: Sequence[Turn], i: int) -> list[int]:
    number = allocation.rounds(turns)
    return [j for j in range(len(turns)) if number[j] < number[i]]


History = Literal["own", "rounds", "before", "proposers"]
# which turns' mean score is Q
HISTORIES: dict[History, Callable[[Sequence[Turn], int], Sequence[int]]] = {
    # the agent's own earlier turns (MARTI's debate class)
    "own": lambda turns, i: [j for j in range(i) if turns[j].agent == turns[i].agent],
    "rounds": _rounds,  # all agents' turns of earlier rounds (debate in its generic class)
    "before": lambda turns, i: range(i),  # every turn before (chain)
    # the last turn against all other agents'; the others' turns stay (mixture of agents)
    "proposers": lambda turns, i: [
        j for j in range(i) if i == len(turns) - 1 and turns[j].agent != turns[i].agent
    ],
}
_BY_AGENT = ("own", "rounds")  # forms in which each agent has its own last score


def shaping(
    group: Group,
    *,
    measure: str = "local",
    formula: Formula = "margin",
    history: History = "own",
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
    """

    def rewards(trajectory: Trajectory) -> list[float | None]:
        turns = allocation.unbranched(trajectory).turns
        raw = [allocation.local_score(trajectory, turn, measure) for turn in turns]
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


def tree_shaping(
    group: Group, *, measure: str = "local", gamma: float = 0.3, mix: Share = 0.5
) -> Group:
    """The group with every turn's score shaped by its node's place in its trajectory's tree.

    A node's value is the mean score of its turns; a turn whose score is undecided is masked, and in no mean. Values are
    as measured throughout, whatever the order of the turns; a node with neither parent nor siblings keeps its score.

    Args:
        measure: name of the score r.
        gamma: weight of what a turn has over its baseline.
        mix: λ, the siblings' part of the baseline; the parent has the rest. Who is alone has all of it.
    """

    def rewards(trajectory: Trajectory) -> list[float | None]:
        if not any(turn.node for turn in trajectory.turns):
            raise RewardError(
                f"{locate(trajectory)}: no tree: none of its turns has a node; sample trees"
            )
        raw = [allocation.local_score(trajectory, turn, measure) for turn in trajectory.turns]
        scores: dict[str, list[float]] = defaultdict(list)
        for turn, value in zip(trajectory.turns, raw, strict=True):
            if value is not None:
                scores[turn.node].append(value)
        values = {node: fmean(own) for node, own in scores.items()}
        # r + gamma (r - baseline)   MARTI (ICLR 2026), ab_mcts_processor.py
        return [
            None
            if value is None
            else value + gamma * (value - _baseline(turn.node, values, mix, value))
            for turn, value in zip(trajectory.turns, raw, strict=True)
        ]

    return allocate(group, rewards)


def _baseline(node: str, values: Mapping[str, float], mix: float, own: float) -> float:
    """What a score is held against: itself where there is nothing else."""
    if not node:  # turns before the first branching
        return own
    parent = node.rpartition(".")[0]
    above = values.get(parent)
    others = (other for other in values if other not in ("", node))
    beside = [values[other] for other in others if other.rpartition(".")[0] == parent]
    siblings = fmean(beside) if beside else None
    # baseline = (1 - lambda) parent + lambda leave-one-out mean of the siblings
    if above is not None and siblings is not None:
        return (1 - mix) * above + mix * siblings
    return next((value for value in (above, siblings) if value is not None), own)


def _ordered(clip: tuple[float, float] | None) -> tuple[float, float] | None:
    if clip is not None and clip[0] > clip[1]:
        raise ValueError("expected [low, high]")
    return clip


def coach(
    group: Group,
    *,
    measure: str = "process",
    scale: float = 1.0,
    clip: Annotated[tuple[float, float] | None, AfterValidator(_ordered)] = None,
    outcome_weight: float = 0.0,
) -> Group:
    """The group with the coach's score on every turn; a turn that the coach did not score is masked.

    Args:
        measure: name of the coach's score, from 0 to 10 in "process".
        scale: factor of the score; 1 trains on it as it is, as the paper does.
        clip: (low, high) of the scaled score.
        outcome_weight: weight of the trajectory's outcome beside it; trees, which have none, need 0.
    """

    def process(trajectory: Trajectory, turn: Turn) -> float:
        value = scale * allocation.score_of(trajectory, turn, measure)
        return value if clip is None else min(max(value, clip[0]), clip[1])

    def rewards(trajectory: Trajectory) -> list[float | None]:
        # r_i = clip(c s_i) + w R, with s_i the coach's score   MAPPA (arXiv 2601.23228), where c = 1 and w = 0
        team = outcome_weight * allocation.outcome(trajectory) if outcome_weight else 0.0
        return [
            process(trajectory, turn) + team if measure in turn.scores else None
            for turn in trajectory.turns
        ]

    return allocate(group, rewards)
