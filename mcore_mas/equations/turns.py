"""Turns of a training step as columns for credit assignment, and statistics of groups of turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcore_mas.equations.tensors import Tensor, torch

_INT64_MAX = 2**63 - 1

# Votes count as equal if their σ is at most this, in units of |μ|, or of 1 where |μ| is smaller.
_EQUAL_VOTES_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Columns of n turns with T loss-carrying tokens in total, in the order of the turns.

    The key columns hold integer ids; equal ids mean equal values. These columns always exist:
    policy, task, trajectory, agent, turn (index along its branch of the trajectory), state (the
    environment's state, or the prompt in environments that describe none), round (number of the
    turn's round, as in `Turn`), node (of the trajectory's tree; nodes of different trajectories have
    different ids) and parent (id of the parent node; -1 at the root, and at its children if the root
    has no turns).

    Attributes:
        rewards: [n] float64, reward of each turn minus the sum of its token penalties.
        keys: [n] int64 by column name.
        lengths: [n] int64, number of tokens that carry loss.
        step_rewards: [n, K] float64, rewards of the environment's steps, with penalties, from the
            turn's round on; padded with 0.
        greedy_rewards: [n] float64, mean reward of the agent's turns in the greedy trajectory of
            the task.
        penalties: [T] float64, subtracted from the reward token by token.
        values: [T] float64, the critic's value before each token.
        cluster_states: maps a similarity in (0, 1] to [n] ids, which are equal for turns of a task
            whose prompts are at least that similar.
    """

    rewards: Tensor
    keys: Mapping[str, Tensor]
    lengths: Tensor
    step_rewards: Tensor | None = None
    greedy_rewards: Tensor | None = None
    penalties: Tensor | None = None
    values: Tensor | None = None
    cluster_states: Callable[[float], Tensor] | None = None

    def joint_ids(self, *columns: str) -> Tensor:
        """Return joint ids of several key columns, [n] int64 counted from 0.

        Two turns get equal ids if they agree in all `columns`.
        """
        # The ids of the columns are the digits of one number, each in its own base `width`.
        joint = torch.zeros_like(self.lengths)
        size = 1  # all joint ids are below it
        for column in columns:
            values = self.keys[column] + 1  # counted from 0: a parent may be -1
            width = int(values.max()) + 1
            if size > _INT64_MAX // width:  # the next joint ids would overflow
                joint = dense_ids(joint)
                size = int(joint.max()) + 1
            joint = joint * width + values
            size = size * width
        return dense_ids(joint)

    def token_rewards(self) -> Tensor:
        """Return the reward of each token, [T]: the turn's reward on its last token, minus token penalties."""
        if self.penalties is None:
            rewards = torch.zeros(int(self.lengths.sum())).double()
            turn_rewards = self.rewards
        else:
            # The sum of the penalties is subtracted from `self.rewards` already. Add it back, so that
            # the last token gets the turn's reward without penalties.
            rewards = -self.penalties
            turn_of_token = self.by_token(torch.arange(len(self.rewards)))
            turn_rewards = self.rewards + sum_by_group(
                self.penalties, turn_of_token, len(self.rewards)
            )
        last_token = self.lengths.cumsum(0) - 1
        # An empty reply has no last token; its index would point into the reply before it.
        not_empty = self.lengths > 0
        return rewards.index_add(0, last_token[not_empty], turn_rewards[not_empty])

    def by_token(self, column: Tensor) -> Tensor:
        """Repeat a column [n] for every token of each turn, [T]."""
        return column.repeat_interleave(self.lengths)


def dense_ids(keys: Tensor) -> Tensor:
    """Map keys [n] to ids counted from 0 without gaps, [n]."""
    return torch.unique(keys, return_inverse=True)[1]  # type: ignore[no-any-return]


def sum_by_group(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum `values` [n] by group id [n]; the result has shape [groups]."""
    return torch.zeros(groups, dtype=values.dtype).index_add(0, group, values)


def mean_by_group(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Average `values` [n] by group id [n]; the result has shape [groups], and no group may be empty.

    The mean of equal values is exactly that value. A sum divided by a count would be off by
    rounding: peers with equal scores would get advantages of 1e-12, which Adam turns into full
    steps.
    """
    minimum = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")
    excess = sum_by_group(values - minimum[group], group, groups)
    return minimum + excess / group.bincount(minlength=groups)


def reverse_scan(values: Tensor, decay: float, lengths: Tensor) -> Tensor:
    """Compute y_t = x_t + decay * y_{t+1} within consecutive segments.

    The work is linear in the number of values: pass k updates the value k positions before the last
    one, in every segment that is long enough.

    Args:
        values: [sum of lengths] x_t of all segments, one after the other.
        decay: factor of the next result.
        lengths: [s] length of each segment.
    """
    result = values.clone()
    last = lengths.cumsum(0) - 1
    order = lengths.argsort(descending=True, stable=True)
    last = last[order]
    sizes = lengths[order]
    longest = int(sizes[0]) if len(sizes) else 0
    for back in range(1, longest):
        # `sizes` descends, so `-sizes` ascends: the search counts the segments with more than `back` values.
        longer_count = int(torch.searchsorted(-sizes, -back, right=False))
        position = last[:longer_count] - back
        result[position] += decay * result[position + 1]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Definition of peer groups and votes.

    Turns that agree in the key columns `peer_columns` form a group, in which they are compared.
    Turns that agree in the key columns `vote_columns` are one voter, whose score is their mean reward.
    A voter has one vote, with this score, in each group that has a turn of it.
    """

    peer_columns: tuple[str, ...]
    vote_columns: tuple[str, ...]

    @property
    def vote_sources(self) -> frozenset[str]:
        """Mechanisms that put votes of several trajectories or branches into a peer group; a run needs one of them.

        - "groups": several trajectories of a task, unless peers share a state.
        - "trees": several branches of a tree.
        - "states": several trajectories that meet in a state, if peers share a state. The environment
          must name its states, because prompts compared as texts hardly ever repeat after the first
          turn.

        Several turns of one trajectory are no mechanism, although they may have several votes: most
        rewards pay them equally. `check_vote_sources` refuses a run without any mechanism.
        """
        sources = {
            "trajectory": "states" if "state" in self.peer_columns else "groups",
            "node": "trees",
        }
        columns = [column for column in self.vote_columns if column not in self.peer_columns]
        return frozenset(sources[column] for column in columns if column in sources)

    def statistics(self, turns: Turns, ddof: int = 1) -> GroupStatistics:
        """Compute mean and standard deviation of the votes in each peer group.

        Args:
            turns: the turns of a step.
            ddof: σ divides by (votes - ddof).
        """
        voter = turns.joint_ids(*self.vote_columns)
        group = turns.joint_ids(*self.peer_columns)
        groups = int(group.max()) + 1
        voters = int(voter.max()) + 1

        score = mean_by_group(turns.rewards, voter, voters)[voter]
        # A voter has one vote in each group in which it has turns.
        vote_index = dense_ids(group * voters + voter)
        vote_scores = torch.empty(int(vote_index.max()) + 1, dtype=score.dtype)
        vote_scores[vote_index] = score
        vote_group = torch.empty(len(vote_scores), dtype=torch.int64)
        vote_group[vote_index] = group

        size = vote_group.bincount(minlength=groups)
        mean = mean_by_group(vote_scores, vote_group, groups)
        squares = sum_by_group((vote_scores - mean[vote_group]) ** 2, vote_group, groups)
        std = (squares / (size - ddof).clamp(min=1)).sqrt()
        return GroupStatistics(
            grouping=self,
            score=score,
            mean=mean[group],
            std=std[group],
            size=size[group],
            vote_index=vote_index,
            vote_scores=vote_scores,
            vote_group=vote_group,
        )


Peers = Literal["task", "agent", "state"]
Vote = Literal["trajectory", "turn"]
_PEER_COLUMNS: dict[Peers, tuple[str, ...]] = {
    "task": ("task",),
    "agent": ("task", "agent"),
    "state": ("task", "state", "agent", "turn"),
}


def grouping(peers: Peers, vote: Vote) -> Grouping:
    """Return the grouping of turns by task, by agent and task, or by state.

    Args:
        peers: turns of the same "task"; of the same "agent" on it; or of the same agent
            on it in the same "state", with the same turn index.
        vote: "trajectory": a trajectory votes once, with the mean of its turns among these peers;
            "turn": every turn votes.
    """
    peer_columns = _PEER_COLUMNS[peers]
    if vote == "turn":
        return Grouping(peer_columns=peer_columns, vote_columns=("trajectory", "node", "turn"))
    # A trajectory has one task, so "trajectory" takes the place of "task".
    columns_within_task = [column for column in peer_columns if column != "task"]
    return Grouping(peer_columns=peer_columns, vote_columns=("trajectory", *columns_within_task))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Votes of each peer group, as seen from each of n turns; there are m votes.

    Attributes:
        grouping: the definition of groups and votes.
        score: [n] score of the turn's vote: the mean reward of the turns of that vote.
        mean: [n] mean over the votes of the turn's group.
        std: [n] standard deviation over the votes of the turn's group.
        size: [n] number of votes in the turn's group.
        vote_index: [n] index of the turn's vote, below m.
        vote_scores: [m] score of each vote.
        vote_group: [m] group of each vote.
    """

    grouping: Grouping
    score: Tensor
    mean: Tensor
    std: Tensor
    size: Tensor
    vote_index: Tensor
    vote_scores: Tensor
    vote_group: Tensor

    @property
    def votes_differ(self) -> Tensor:
        """Mask [n]: the votes of the turn's group differ by more than float64 rounding."""
        return self.std > _EQUAL_VOTES_TOLERANCE * self.mean.abs().clamp(min=1)

    @property
    def scale(self) -> Tensor:
        """Divisor [n] of an advantage: σ, or 1 where the votes do not differ.

        A group of one vote has divisor 1 too, as in Dr. MAS's released code. Where the votes of a group
        do not differ, r - μ is 0 if μ is the mean of this group. With the option `std` of `relative`, μ
        may be the mean of another group; r - μ is then divided by 1 + ε, and not by ε alone.
        """
        return torch.where(self.votes_differ, self.std, 1.0)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an advantage estimator.

    Attributes:
        values: advantages in float64, [n] by turn or [T] by token.
        groups: statistics of the groups that were compared, by name; empty if turns were not
            compared.
        returns: [T] targets of a critic; None without a critic.
    """

    values: Tensor
    groups: Mapping[str, GroupStatistics] = field(default_factory=dict)
    returns: Tensor | None = None
