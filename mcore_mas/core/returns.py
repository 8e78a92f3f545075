"""Advantages by token from returns: REINFORCE++ and generalised advantage estimation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mcore_mas.core.turns import Turns, average, reverse_scan, total

Across = Literal["turn", "agent"]
Whitened = Literal["batch", "policy", "agent"]
# whose tokens are whitened together
_WHITEN: dict[str, tuple[str, ...]] = {"batch": (), "policy": ("policy",), "agent": ("agent",)}


def whiten(values: Tensor, group: Tensor, eps: float = 1e-8) -> Tensor:
    """[T] (x - mean) / sqrt(var + ε) over the tokens of each `group` [T]; var divides by (tokens - 1)."""
    count = group.bincount()
    centred = values - average(values, group, len(count))[group]
    variance = total(centred**2, group, len(count)) / (count - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()[group]


def reinforce_pp(turns: Turns, *, gamma: float = 1.0, whitened: Whitened = "policy") -> Tensor:
    """Advantages [T]: each token's return to go in its turn, whitened   REINFORCE++, arXiv 2501.03262.

    `whitened` says over whose tokens: the whole "batch", those of a "policy" or of an "agent" (MARTI).
    """
    returns = reverse_scan(turns.token_rewards(), gamma, turns.lengths)
    return whiten(returns, turns.by_token(turns.key(*_WHITEN[whitened])))


def reinforce_pp_baseline(turns: Turns, *, whitened: Whitened = "policy") -> Tensor:
    """Advantages [T]: the turn's score less its task's mean, whitened   REINFORCE++-baseline, arXiv 2501.03262."""
    task = turns.key("task")
    mean = average(turns.scores, task, int(task.max()) + 1)
    return whiten(turns.by_token(turns.scores - mean[task]), turns.by_token(turns.key(*_WHITEN[whitened])))


def gae(
    turns: Turns,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    across: Across = "turn",
    whitened: Whitened = "policy",
) -> Tensor:
    """Advantages [T] against a critic, whitened: A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t.

    GAE, arXiv 1506.02438; for teams as UnityMAS-O uses it. `across` ends an episode at the end of each "turn"
    (UnityMAS-O), or joins the turns of one "agent" in a trajectory in their order.
    """
    advantages, _ = advantages_and_returns(turns, gamma=gamma, lam=lam, across=across)
    return whiten(advantages, turns.by_token(turns.key(*_WHITEN[whitened])))


def advantages_and_returns(
    turns: Turns, *, gamma: float = 1.0, lam: float = 1.0, across: Across = "turn"
) -> tuple[Tensor, Tensor]:
    """(A_t [T] before whitening, the critic's targets A_t + V_t [T]).

    Raises:
        ValueError: the turns have no values.
    """
    if turns.values is None:
        raise ValueError("gae needs a critic's values, which are not there")
    rewards, values = turns.token_rewards(), turns.values
    order = torch.arange(len(values))
    lengths = turns.lengths
    if across == "agent":  # tokens of an agent's turns in a trajectory, one after the other
        place = turns.by_token(turns.key("trajectory", "agent")) * (int(turns.keys["turn"].max()) + 1)
        order = torch.argsort(place + turns.by_token(turns.keys["turn"]), stable=True)
        owner = turns.by_token(turns.key("trajectory", "agent"))
        lengths = owner.bincount()
    rewards, values = rewards[order], values[order]
    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    after[lengths.cumsum(0) - 1] = 0.0  # an episode is worth nothing beyond its end
    advantages = reverse_scan(rewards + gamma * after - values, gamma * lam, lengths)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return advantages[back], (advantages + values)[back]
