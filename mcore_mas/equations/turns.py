"""What an estimator may look at: the turns of a step as columns, and sums over groups of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """n turns with T tokens in all, flat and in the order of the turns.

    Key columns number ids: equal numbers, equal ids. Always there: policy, task, trajectory, agent, turn (position on
    its own line), state (what the agent saw), round (environment step), node (of the tree, within its trajectory) and
    parent (numbered as `node` is, -1 at the root).
    """

    scores: Tensor  # [n] float64, each turn's reward, token penalties included
    keys: Mapping[str, Tensor]  # [n] int64 by column
    lengths: Tensor  # [n] int64 tokens that carry loss
    steps: Tensor | None = None  # [n] float64 reward of the environment step that followed
    greedy: Tensor | None = None  # [n] float64 outcome of the task's greedy trajectory
    penalties: Tensor | None = None  # [T] float64 taken from the reward token by token
    values: Tensor | None = None  # [T] float64 the critic's value before each token
    alike: Callable[[float], Tensor] | None = None  # similarity in (0, 1] -> [n] numbers of states at least so alike

    def key(self, *columns: str) -> Tensor:
        """[n] int64 from 0 on: turns that agree in all `columns` get equal numbers."""
        joint, size = torch.zeros_like(self.lengths), 1
        for column in columns:
            values = self.keys[column] + 1
            width = int(values.max()) + 1
            if size > _INT64 // width:
                joint = number(joint)
                size = int(joint.max()) + 1
            joint, size = joint * width + values, size * width
        return number(joint)

    def token_rewards(self) -> Tensor:
        """[T] the turn's own reward on its last token, less the penalty of every token."""
        rewards = -self.penalties if self.penalties is not None else torch.zeros(int(self.lengths.sum())).double()
        last = self.lengths.cumsum(0) - 1
        own = self.scores
        if self.penalties is not None:
            own = own + total(self.penalties, self.by_token(torch.arange(len(own))), len(own))
        return rewards.index_add(0, last, own)

    def by_token(self, column: Tensor) -> Tensor:
        """[T] from [n]: every token has its turn's value."""
        return column.repeat_interleave(self.lengths)


def number(keys: Tensor) -> Tensor:
    """[n] equal keys as equal numbers from 0 on."""
    numbers: Tensor = torch.unique(keys, return_inverse=True)[1]
    return numbers


def total(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """[groups] sums of `values` [n] by `group` [n]."""
    return torch.zeros(groups, dtype=values.dtype).index_add(0, group, values)


def average(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """[groups] means of `values` [n] by `group` [n], none of them empty; of equal values it is that value to the bit.

    A plain sum over a count rounds: peers with equal scores would get advantages of 1e-12, which Adam makes full steps.
    """
    least = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")
    return least + total(values - least[group], group, groups) / group.bincount(minlength=groups)


def reverse_scan(values: Tensor, decay: float, lengths: Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1} within consecutive segments of `lengths` [s] in `values` [sum of lengths].

    Work is linear in the values; every pass treats all segments that are still that long.
    """
    result = values.clone()
    last = lengths.cumsum(0) - 1
    order = lengths.argsort(descending=True, stable=True)
    last, sizes = last[order], lengths[order]
    for back in range(1, int(sizes[0]) if len(sizes) else 0):
        active = int(torch.searchsorted(-sizes, -back, right=False))  # segments longer than `back`
        here = last[:active] - back
        result[here] += decay * result[here + 1]
    return result


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
