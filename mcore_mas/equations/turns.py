"""Turns of a training step as columns for credit assignment, and the statistics of groups of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcore_mas.equations.tensors import Tensor, torch

_INT64 = 2**63 - 1
_EQUAL = 1e-9  # σ in units of |μ|, or of 1 where that is less: votes so close are equal


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
    steps: Tensor | None = (
        None  # [n, K] float64 rewards of the environment's steps from the turn's round on, then 0
    )
    greedy: Tensor | None = None  # [n] float64 outcome of the task's greedy trajectory
    penalties: Tensor | None = None  # [T] float64 taken from the reward token by token
    values: Tensor | None = None  # [T] float64 the critic's value before each token
    alike: Callable[[float], Tensor] | None = (
        None  # similarity in (0, 1] -> [n] numbers of states at least so alike
    )

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
        rewards = (
            -self.penalties
            if self.penalties is not None
            else torch.zeros(int(self.lengths.sum())).double()
        )
        last = self.lengths.cumsum(0) - 1
        own = self.scores
        if self.penalties is not None:
            own = own + total(self.penalties, self.by_token(torch.arange(len(own))), len(own))
        said = (
            self.lengths > 0
        )  # a reply of no tokens has none to reward, and not the one before it
        return rewards.index_add(0, last[said], own[said])

    def by_token(self, column: Tensor) -> Tensor:
        """[T] from [n]: every token has its turn's value."""
        return column.repeat_interleave(self.lengths)


def number(keys: Tensor) -> Tensor:
    """[n] equal keys as equal numbers from 0 on."""
    return torch.unique(keys, return_inverse=True)[1]  # type: ignore[no-any-return]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Who is compared with whom: turns that agree in `peers`, of which those that agree in `vote` count once."""

    peers: tuple[str, ...]  # key columns
    vote: tuple[str, ...]

    @property
    def contrast(self) -> frozenset[str]:
        """What gives a group several votes: several trajectories of a task ("groups"), branches of a tree ("trees").

        Where peers are of one state, trajectories do if the environment names its states ("states"): as texts they
        hardly ever share one beyond the first turn.
        """
        apart = {"trajectory": "states" if "state" in self.peers else "groups", "node": "trees"}
        return frozenset(
            apart[column] for column in self.vote if column in apart and column not in self.peers
        )

    def statistics(self, turns: Turns, ddof: int = 1) -> GroupStatistics:
        """Count each vote once in each group that it has turns in; σ divides by (votes - `ddof`)."""
        own, group = turns.key(*self.vote), turns.key(*self.peers)
        groups, voters = int(group.max()) + 1, int(own.max()) + 1
        score = average(turns.scores, own, voters)[own]
        vote = number(group * voters + own)
        votes = torch.empty(int(vote.max()) + 1, dtype=score.dtype)
        votes[vote] = score
        group_of = torch.empty(len(votes), dtype=torch.int64)
        group_of[vote] = group
        size = group_of.bincount(minlength=groups)
        mean = average(votes, group_of, groups)
        squares = total((votes - mean[group_of]) ** 2, group_of, groups)
        std = (squares / (size - ddof).clamp(min=1)).sqrt()
        return GroupStatistics(
            self, score, mean[group], std[group], size[group], vote, votes, group_of
        )


Peers = Literal["task", "agent", "state"]
Vote = Literal["trajectory", "turn"]
_PEERS: dict[Peers, tuple[str, ...]] = {
    "task": ("task",),
    "agent": ("task", "agent"),
    "state": ("task", "state", "agent", "turn"),
}


def grouping(peers: Peers, vote: Vote) -> Grouping:
    """Turns of a task, of an agent on it, or of one of its states, of which a trajectory or each turn is a vote.

    A trajectory votes by its turns among these peers.
    """
    columns = _PEERS[peers]
    votes = {"turn": ("trajectory", "node", "turn"), "trajectory": ("trajectory", *columns[1:])}
    return Grouping(peers=columns, vote=votes[vote])


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The votes of each peer group, seen from every turn."""

    grouping: Grouping
    own: Tensor  # [n] the score of the turn's vote: the mean over the turns of that vote
    mean: Tensor  # [n] over the votes of its group
    std: Tensor  # [n]
    size: Tensor  # [n] votes in its group
    vote: Tensor  # [n] which of the m votes a turn belongs to
    votes: Tensor  # [m] the score of each (group, vote)
    group_of: Tensor  # [m] its group

    @property
    def differ(self) -> Tensor:
        """[n] whether the votes of its group differ, by more than float64 rounds."""
        return self.std > _EQUAL * self.mean.abs().clamp(min=1)

    @property
    def scale(self) -> Tensor:
        """[n] σ; 1 where the votes do not differ, one vote or equal ones (Dr. MAS's code: one vote has σ = 1).

        Where μ is of another group than σ, r - μ stays then in reward units, and is never divided by ε alone.
        """
        return torch.where(self.differ, self.std, 1.0)


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator made of the turns, and of what."""

    values: Tensor  # [n] by turn, or [T] by token; float64
    groups: Mapping[str, GroupStatistics] = field(
        default_factory=dict
    )  # that it compared, by statistic; {}: none
    returns: Tensor | None = None  # [T] targets of a critic
