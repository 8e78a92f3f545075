"""Reward penalties, which are added to the reward of a turn after the allocator; each is a function of one turn.

invalid          penalty of a malformed reply (Dr.MAS; UnityMAS-O's format reward)
overlong         penalty of a reply near its token limit (DAPO)
mask_truncated   mask of a reply that was cut off, which then does not train (DAPO)

Each function describes its own options. Two of them share this one:

Options:
    coef: size of the penalty of `invalid` or `overlong`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat as Cost
from pydantic import PositiveInt

from rollout.base.numbers import real_number
from rollout.records.trajectory import Group, Status, Trajectory, Turn
from rollout.rewards.allocation import RewardError, describe_position

# (turn, **options) -> amount that is added to its reward; None: the turn does not train
Penalty = Callable[..., float | None]


def _thinks_once(text: str) -> bool:
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.index("<think>") < text.index("</think>")


ValidityRule = Literal["no_chinese", "one_thought"]
# Rules that a reply must satisfy in addition to parsing. Source: Dr.MAS, general_projection in
# agent_system/agent/utils.py
VALIDITY_RULES: dict[ValidityRule, Callable[[str], bool]] = {
    "no_chinese": lambda text: re.search("[\u4e00-\u9fff]", text) is None,
    "one_thought": _thinks_once,  # <think> and then </think>, each exactly once
}


def invalid_reply(
    turn: Turn, *, coef: Cost = 1.0, rules: Mapping[str, Sequence[ValidityRule]] | None = None
) -> float:
    """Return -coef if the reply is malformed, or if it breaks a rule; else 0.

    A reply is malformed if it is cut off, if the role's parser refuses it, or if it has a malformed
    tool call.

    Args:
        rules: names of the rules that the replies of each agent must follow. `no_chinese`: a reply
            has no Chinese characters. `one_thought`: it has `<think>` and then `</think>`, each once.
            A reply that breaks a rule is penalised but still used.
    """
    # r -= coef [malformed]. Source: Dr.MAS, apply_invalid_action_penalty. It is also UnityMAS-O's
    # format reward, format_weight * phi, where phi is -1 for a malformed reply; coef is format_weight.
    follows_rules = all(
        VALIDITY_RULES[rule](turn.text) for rule in (rules or {}).get(turn.agent, ())
    )
    return 0.0 if turn.valid and follows_rules else -coef


def overlong(
    turn: Turn,
    *,
    buffer: PositiveInt,
    max_tokens: Mapping[str, PositiveInt] | None = None,
    coef: Cost = 1.0,
) -> float:
    """Return the penalty of a reply that comes close to its token limit.

    It is 0 up to `buffer` tokens before the limit, and falls from there linearly to -coef at the
    limit.

    Args:
        buffer: number of tokens before the limit in which the penalty applies.
        max_tokens: limit of a reply by agent; a run fills in the agent's `max_tokens` if absent.

    Raises:
        RewardError: the turn's agent has no limit, or one below `buffer`.
    """
    limit = (max_tokens or {}).get(turn.agent)
    if limit is None or buffer > limit:
        raise RewardError(
            f"overlong: max_tokens of agent '{turn.agent}' is {limit} and buffer {buffer}; "
            "expected buffer <= max_tokens"
        )
    excess = len(turn.completion_ids) - (limit - buffer)
    # r -= coef min(1, max(0, excess / buffer)). Source: DAPO (arXiv 2503.14476), soft overlong
    # punishment.
    return -coef * min(excess / buffer, 1.0) if excess > 0 else 0.0


def mask_truncated(turn: Turn) -> float | None:
    """Return None, which masks the turn, for a reply that was cut off; its end is unknown."""
    return None if turn.finish_reason == "length" else 0.0  # DAPO, overlong filtering


PENALTIES: dict[str, Penalty] = {
    "invalid": invalid_reply,
    "overlong": overlong,
    "mask_truncated": mask_truncated,
}


def apply_penalties(
    group: Group,
    penalties: Sequence[Callable[[Turn], float | None]],
    allocate: Callable[[Group], Group] = lambda group: group,
) -> Group:
    """Run the allocator, then add the sum of the penalties to the reward of each turn.

    If a penalty is None, the turn is masked and does not train. Its reward, with the other penalties,
    still enters the statistics of its comparison group, such as the mean reward, because DAPO masks
    only the loss.
    A turn whose sum is not 0 gets the sum as the score `penalty`. Turns that the allocator has masked
    stay as they are.

    Args:
        group: trajectories of one task.
        penalties: functions that return the penalty of a turn, or None.
        allocate: allocator; by default the group has its rewards already.

    Raises:
        RewardError: a turn of a completed trajectory has no reward and is not masked, or gets one
            that is not finite.
    """

    def penalised(trajectory: Trajectory, turn: Turn) -> Turn:
        if turn.masked:
            return turn
        if turn.reward is None:
            raise RewardError(
                f"{describe_position(trajectory, turn)}: the allocator set no reward; None is for masked turns"
            )
        amounts = [penalty(turn) for penalty in penalties]
        try:
            reward = real_number(turn.reward, "reward")
            total = 0.0
            for amount in amounts:
                if amount is not None:
                    total += real_number(amount, "penalty")
        except TypeError as error:
            raise RewardError(f"{describe_position(trajectory, turn)}: {error}") from None
        if not math.isfinite(reward + total):
            raise RewardError(
                f"{describe_position(trajectory, turn)}: reward is {reward + total}; expected a finite number"
            )
        scores = {**turn.scores, "penalty": total} if total else turn.scores
        return replace(turn, reward=reward + total, scores=scores, masked=None in amounts)

    group = allocate(group)
    trajectories = []
    for trajectory in group.trajectories:
        if trajectory.status is Status.COMPLETED:
            turns = tuple(penalised(trajectory, turn) for turn in trajectory.turns)
            trajectory = replace(trajectory, turns=turns)
        trajectories.append(trajectory)
    return replace(group, trajectories=tuple(trajectories))
