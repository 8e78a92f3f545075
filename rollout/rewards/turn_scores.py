"""Allocators that use scores of single turns: local and team scores, differences, MARTI's shaping, a coach."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import AfterValidator

from rollout.base.section import Names, Share
from rollout.records.trajectory import Group, Trajectory, Turn
from rollout.rewards import allocation
from rollout.rewards.allocation import RewardError, allocate, describe_position


def local_team(
    group: Group, *, alpha: float = 1.0, missing_local: Literal["refuse", "zero"] = "refuse"
) -> Group:
    """Reward every turn with its score "local" plus alpha times the team's reward.

    A turn whose score "local" is undecided is masked. The team's reward is the turn's score "team",
    except in a tree. There, the scores "team" of a branch that continued may include rewards of
    later steps, which the other branches never reached. The team's reward in a tree is therefore
    that of the steps between the turn's node and the next one, times `trainer.branching.alpha`. A run
    may change only one of the two alphas from 1, because both multiply this reward.

    Args:
        alpha: weight of the team's reward.
        missing_local: handling of a turn without a score "local": `refuse` raises an error, `zero`
            takes 0.
    """

    def local_reward(trajectory: Trajectory, turn: Turn) -> float | None:
        is_missing = "local" not in turn.scores and "undecided" not in turn.scores
        if is_missing and missing_local == "zero":
            return 0.0
        return allocation.local_score(trajectory, turn, "local")

    def rewards(trajectory: Trajectory) -> list[float | None]:
        local_by_node: dict[str, float] = defaultdict(float)  # sums of local scores
        for turn in trajectory.turns:
            local_by_node[turn.node] += turn.scores.get("local", 0.0)
        result: list[float | None] = []
        for turn in trajectory.turns:
            local = local_reward(trajectory, turn)
            if turn.node:
                # A node's score "branch" is the sum of its turns' local scores and the team's reward.
                branch_score = allocation.score_of(trajectory, turn, "branch")
                team_reward = branch_score - local_by_node[turn.node]
            else:
                team_reward = allocation.score_of(trajectory, turn, "team")
            # r_i = r_local + alpha r_team. Source: Stronger-MAS (arXiv 2510.11062).
            result.append(None if local is None else local + alpha * team_reward)
        return result

    return allocate(group, rewards)


def turn_difference(
    group: Group, *, metric: str, scored: Names, absolute: Sequence[str] = ()
) -> Group:
    """Reward every turn with the change of the score `metric` in its round.

    A round ends with a turn of an agent in `scored`; f of the round is the score `metric` of that
    turn. All turns of a round, such as a search and the answer that follows it, get its f minus f of
    the round before. Before the first round f is 0. Turns after the last round get 0.

    Args:
        metric: name of the score f, such as "token_f1" or "pass_rate".
        scored: agents on whose replies the environment measures f.
        absolute: agents that get f itself, in every round.

    Raises:
        RewardError: a turn of an agent in `scored` has no score `metric`, another turn has a score
            `metric` that differs from f of its round, an agent in `absolute` spoke after the last
            round, or a trajectory is a tree.
    """

    def rewards(trajectory: Trajectory) -> list[float]:
        turns = allocation.require_no_tree(trajectory).turns
        result: list[float] = []
        previous = 0.0
        round_start = 0
        for index, last_turn in enumerate(turns):
            if last_turn.agent not in scored:
                continue
            value = allocation.score_of(trajectory, last_turn, metric)
            turns_of_round = turns[round_start : index + 1]
            _check_equal_scores(trajectory, turns_of_round, metric)
            for turn in turns_of_round:
                # r = f_t for agents in `absolute`, else f_t - f_{t-1} with f_{-1} = 0.
                # Source: UnityMAS-O (arXiv 2605.26646).
                result.append(value if turn.agent in absolute else value - previous)
            previous = value
            round_start = index + 1
        for turn in turns[round_start:]:
            if turn.agent in absolute:
                raise RewardError(
                    f"{describe_position(trajectory, turn)}: '{metric}' is measured neither on this turn nor later"
                )
            result.append(0.0)
        return result

    return allocate(group, rewards)


def _check_equal_scores(
    trajectory: Trajectory, turns_of_round: Sequence[Turn], metric: str
) -> None:
    """Raise RewardError if a turn's score `metric` differs from that of the last turn of its round.

    Turns without this score are not checked.
    """
    last_turn = turns_of_round[-1]
    value = last_turn.scores[metric]
    for turn in turns_of_round:
        if turn.scores.get(metric, value) != value:
            raise RewardError(
                f"{describe_position(trajectory, turn)}: '{metric}' is {turn.scores[metric]}, but turn "
                f"{last_turn.index} ({last_turn.agent}) ends its round with {value}; `scored` must list every "
                "agent whose replies are measured"
            )


Formula = Literal["margin", "quality"]
# Delta(R, Q) by formula. Source: MARTI (ICLR 2026), auto_reward_alloc.py.
SHAPING_FORMULAS: dict[Formula, Callable[[float, float], float]] = {
    "margin": lambda r, q: r - q,
    "quality": lambda r, q: q * r - (1 - q) * (1 - r),  # R and Q in [0, 1]
}


History = Literal["own", "rounds", "before", "proposers"]


def _earlier_turns_of_agent(turns: Sequence[Turn], i: int) -> list[int]:
    """Return the indices of the earlier turns of the agent of turn `i`."""
    return [j for j in range(i) if turns[j].agent == turns[i].agent]


def _turns_of_earlier_rounds(turns: Sequence[Turn], i: int) -> list[int]:
    """Return the indices of all agents' turns in the rounds before that of turn `i`.

    Round n has the n-th turn of every agent, as in a debate. A turn of such a round may come after
    turn `i`, if its agent speaks less often. `Turn.round` numbers other rounds, those between two
    steps of the environment.
    """
    rounds = allocation.number_turns_by_agent(turns)
    return [j for j in range(len(turns)) if rounds[j] < rounds[i]]


def _all_earlier_turns(turns: Sequence[Turn], i: int) -> list[int]:
    return list(range(i))


def _turns_of_proposers(turns: Sequence[Turn], i: int) -> list[int]:
    """Return the indices of the other agents' turns if turn `i` is the last one.

    For other turns return [], so that they are not shaped.
    """
    if i < len(turns) - 1:
        return []
    return [j for j in range(i) if turns[j].agent != turns[i].agent]


# (turns, index of a turn) -> indices of the turns whose mean score is Q. Source: MARTI, which has these
# histories, in this order, for its debate class, for debates of its generic class, for chains, and for
# mixtures of agents.
HISTORY_SELECTORS: dict[History, Callable[[Sequence[Turn], int], list[int]]] = {
    "own": _earlier_turns_of_agent,
    "rounds": _turns_of_earlier_rounds,
    "before": _all_earlier_turns,
    "proposers": _turns_of_proposers,
}
# Histories for which R_final is the score of the agent's final turn, not of the trajectory's.
_HISTORIES_WITH_FINAL_SCORE_BY_AGENT = ("own", "rounds")


def shaping(
    group: Group,
    *,
    measure: str = "local",
    formula: Formula = "margin",
    history: History = "own",
    alpha: float = 0.5,
    beta: float = 0.0,
) -> Group:
    """Reward every turn with its score R, shaped by the mean Q of earlier scores and the final score R_final.

    The reward is R + alpha formula(R, Q) + beta R_final. Without earlier scores the formula adds
    nothing. A turn whose score is undecided is masked and does not enter Q. With beta, a turn is also
    masked if R_final is undecided.

    Args:
        measure: name of the turns' score that is R: "local" or one of the environment's metrics.
        formula: `margin`, R - Q; or `quality`, QR - (1-Q)(1-R), for R and Q in [0, 1].
        history: turns whose scores Q averages. `own`: earlier turns of the agent. `rounds`: turns of
            all agents in earlier rounds, where round n has the n-th turn of every agent. `before`:
            all earlier turns. `proposers`: for the last turn, all turns of other agents; for others,
            none. Q averages the measured scores, not the shaped ones.
        alpha: weight of the formula.
        beta: weight of R_final (0.5 in MARTI's `*_with_outcome`): the score of the agent's final turn
            for `own` and `rounds`, of the trajectory's final turn for `before` and `proposers`.
    """

    def rewards(trajectory: Trajectory) -> list[float | None]:
        turns = allocation.require_no_tree(trajectory).turns
        scores = [allocation.local_score(trajectory, turn, measure) for turn in turns]
        final_scores = _final_scores(turns, scores, history)
        if beta == 0:
            # Without its weight, R_final adds nothing, and an undecided one masks no turn.
            final_scores = [0.0] * len(turns)
        result: list[float | None] = []
        for i, (score, final_score) in enumerate(zip(scores, final_scores, strict=True)):
            if score is None or final_score is None:
                result.append(None)
                continue
            history_scores = [scores[j] for j in HISTORY_SELECTORS[history](turns, i)]
            decided = [value for value in history_scores if value is not None]
            # r = R + alpha Delta(R, Q) + beta R_final
            delta = SHAPING_FORMULAS[formula](score, fmean(decided)) if decided else 0.0
            result.append(score + alpha * delta + beta * final_score)
        return result

    return allocate(group, rewards)


def _final_scores(
    turns: Sequence[Turn], scores: Sequence[float | None], history: History
) -> list[float | None]:
    """Return R_final of every turn; None if it is undecided."""
    if history not in _HISTORIES_WITH_FINAL_SCORE_BY_AGENT:
        return [scores[-1] for _ in turns]
    # A later score of an agent replaces its earlier ones.
    final_by_agent = {turn.agent: score for turn, score in zip(turns, scores, strict=True)}
    return [final_by_agent[turn.agent] for turn in turns]


def tree_shaping(
    group: Group, *, measure: str = "local", gamma: float = 0.3, mix: Share = 0.5
) -> Group:
    """Reward every turn with its score, shaped by its node's parent and siblings in the tree.

    The reward is score + gamma (score - baseline). The baseline is the mean of the parent's value and
    the siblings' mean value, weighted by `mix`. The value of a node is the mean score of its turns. A
    turn whose score is undecided is masked and left out of the means. The turns of a node with
    neither parent nor siblings keep their scores.

    Args:
        measure: name of the score, such as "local".
        gamma: weight of the difference between a turn's score and its baseline.
        mix: λ, the weight of the siblings in the baseline; the parent has the rest. Without parent
            or without siblings, the other has weight 1.

    Raises:
        RewardError: a trajectory is not a tree, or a turn has no score `measure` and is not undecided.
    """

    def rewards(trajectory: Trajectory) -> list[float | None]:
        if not any(turn.node for turn in trajectory.turns):
            raise RewardError(
                f"{describe_position(trajectory)}: not a tree, because none of its turns has a node; sample trees"
            )
        scores = [allocation.local_score(trajectory, turn, measure) for turn in trajectory.turns]
        scores_by_node: dict[str, list[float]] = defaultdict(list)
        for turn, score in zip(trajectory.turns, scores, strict=True):
            if score is not None:
                scores_by_node[turn.node].append(score)
        node_values = {node: fmean(values) for node, values in scores_by_node.items()}

        result: list[float | None] = []
        for turn, score in zip(trajectory.turns, scores, strict=True):
            if score is None:
                result.append(None)
                continue
            # r + gamma (r - baseline). Source: MARTI (ICLR 2026), ab_mcts_processor.py.
            baseline = _node_baseline(turn.node, node_values, mix, default=score)
            result.append(score + gamma * (score - baseline))
        return result

    return allocate(group, rewards)


def _node_baseline(node: str, values: Mapping[str, float], mix: float, default: float) -> float:
    """Return the value that the scores of a node's turns are compared with.

    It is (1 - λ) parent + λ mean of the siblings, without the node itself. Without a parent or
    without siblings it is the other of the two.

    Args:
        node: name of the node; "" for turns before the first branch.
        values: mean score of each node.
        mix: λ.
        default: value if there is neither a parent nor a sibling.
    """
    if not node:
        return default
    parent = node.rpartition(".")[0]
    parent_value = values.get(parent)
    siblings = [
        value
        for other, value in values.items()
        if other not in ("", node) and other.rpartition(".")[0] == parent
    ]
    if parent_value is not None and siblings:
        return (1 - mix) * parent_value + mix * fmean(siblings)
    if parent_value is not None:
        return parent_value
    return fmean(siblings) if siblings else default


def _check_order(clip: tuple[float, float] | None) -> tuple[float, float] | None:
    if clip is not None and clip[0] > clip[1]:
        raise ValueError("expected [low, high]")
    return clip


def coach(
    group: Group,
    *,
    measure: str = "process",
    scale: float = 1.0,
    clip: Annotated[tuple[float, float] | None, AfterValidator(_check_order)] = None,
    outcome_weight: float = 0.0,
) -> Group:
    """Reward every turn with the coach's score; mask turns that the coach did not score.

    Args:
        measure: name of one of the coach's scores: "process", from 0 to 10, or, if the coach is asked
            for them, "outcome" and "answer_correct", from 0 to 1.
        scale: factor of the score; MAPPA uses 1.
        clip: (low, high) to which the scaled score is clipped; null: it is not clipped.
        outcome_weight: weight of the trajectory's outcome, which is added; must be 0 for trees,
            whose turns off the path have no outcome.
    """

    def coach_reward(trajectory: Trajectory, turn: Turn) -> float:
        value = scale * allocation.score_of(trajectory, turn, measure)
        return value if clip is None else min(max(value, clip[0]), clip[1])

    def rewards(trajectory: Trajectory) -> list[float | None]:
        # r_i = clip(c s_i) + w R, with s_i the coach's score.
        # Source: MAPPA (arXiv 2601.23228), where c = 1 and w = 0.
        outcome_reward = outcome_weight * allocation.outcome(trajectory) if outcome_weight else 0.0
        return [
            coach_reward(trajectory, turn) + outcome_reward if measure in turn.scores else None
            for turn in trajectory.turns
        ]

    return allocate(group, rewards)
