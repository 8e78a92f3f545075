"""Training samples: one turn each, and what each of its tokens weighs in an update."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import torch

from mcore_mas.equations.losses import AGGREGATIONS, AggregationName, token_weights
from rollout.records.trajectory import Group, Status, Turn, changed, derive_seed, grouped

TurnId = tuple[str, str, int]  # trajectory, node, turn: which turn of a step


class CreditError(ValueError):
    """Rewards cannot become advantages, or a run's advantages say that nothing is learnt: names the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn as training tokens for its policy."""

    policy: str
    agent: str
    task: str
    trajectory: str
    turn: int
    round: int = 0  # which step of the environment followed
    node: str = ""  # branch numbers from the root; "" outside tree sampling
    state: str = (
        ""  # digest of the environment's state without history, or else of what the agent saw
    )
    version: int = 0  # oldest weights that sampled any of it
    age: int = 0  # by how many hand-overs they are behind those being trained
    prompt_ids: tuple[int, ...]  # [P]
    completion_ids: tuple[int, ...]  # [C]
    trained: tuple[bool, ...] | None = (
        None  # [C] loss mask (response mask): True carries loss; None: all
    )
    temperature: float = 1.0
    reward: float = 0.0
    scores: Mapping[str, float] = field(
        default_factory=dict
    )  # what was measured of the turn, by name
    steps: tuple[
        float, ...
    ] = ()  # reward of every step of its trajectory, by round; see `step_rewards`
    copies: int = 1  # how often the turn counts
    weight: float = 1.0  # of each token's loss, the denominator included once `weigh` has run
    kl_coef: float = 0.0  # factor of the KL term in the loss
    entropy_coef: float = 0.0  # factor of the entropy bonus
    # by token, natural logarithms after temperature; None: not known
    behaviour: tuple[float, ...] | None = None  # [C] log-probabilities of the sampler
    proximal: tuple[float, ...] | None = (
        None  # [C] log-probabilities under the weights at the start of the step
    )
    reference: tuple[float, ...] | None = None  # [C] log-probabilities under the frozen reference
    penalties: tuple[float, ...] | None = None  # [C] taken from the reward
    values: tuple[float, ...] | None = None  # [C] the critic's values before each token
    returns: tuple[float, ...] | None = None  # [C] the critic's targets
    advantages: tuple[float, ...] | None = None  # [C]
    routing: bytes = b""  # [P + C - 1, ...] the experts that the sampler chose, see `Completion`

    @property
    def tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.completion_ids) if self.trained is None else sum(self.trained)

    @property
    def id(self) -> TurnId:
        """Which turn of a step it is."""
        return self.trajectory, self.node, self.turn

    @property
    def has_gradient(self) -> bool:
        """Whether it changes its policy: by an advantage, a KL term or an entropy bonus."""
        return self.tokens > 0 and (
            any(self.advantages or ()) or bool(self.kl_coef or self.entropy_coef)
        )


def to_samples(groups: Iterable[Group]) -> list[Sample]:
    """One sample per turn of every completed trajectory, without turns of which nothing can be said.

    A masked turn with a reward, or a reply of no tokens, counts for its peers and has no token that trains.

    Raises:
        CreditError: a turn has no finite reward, or a trajectory is of another task than its group.
    """
    samples = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.task_id != group.task.id:
                raise CreditError(
                    f"trajectory {trajectory.id}: of task {trajectory.task_id}, but its group is of {group.task.id}"
                )
            if trajectory.status is not Status.COMPLETED:
                continue
            steps = step_rewards(trajectory.turns)
            for turn in trajectory.turns:
                if turn.masked and turn.reward is None:
                    continue
                if turn.reward is None or not math.isfinite(turn.reward):
                    where = f"trajectory {trajectory.id}, turn {turn.index} ({turn.agent})"
                    raise CreditError(
                        f"{where}: reward is {turn.reward}; the reward allocator must set a finite one"
                    )
                samples.append(
                    Sample(
                        policy=turn.policy,
                        agent=turn.agent,
                        task=trajectory.task_id,
                        trajectory=trajectory.id,
                        turn=turn.index,
                        round=turn.round,
                        node=turn.node,
                        state=turn.anchor or turn.state_key,
                        version=turn.oldest_version,
                        prompt_ids=turn.prompt_ids,
                        completion_ids=turn.completion_ids,
                        trained=(False,) * len(turn.completion_ids) if turn.masked else None,
                        behaviour=turn.logprobs,
                        temperature=turn.temperature,
                        reward=turn.reward,
                        scores=turn.scores,
                        steps=steps,
                        routing=turn.routing,
                    )
                )
    return samples


def step_rewards(turns: Collection[Turn]) -> tuple[float, ...]:
    """What the environment gave in each step, with the penalties of the turns before it, by round of a trajectory.

    Dr. MAS's GiGPO takes penalties from step rewards too. The rounds end before the first that no step followed.
    """
    rewards = {turn.round: turn.scores["team"] for turn in turns if "team" in turn.scores}
    for turn in turns:
        if turn.round in rewards:
            rewards[turn.round] += turn.scores.get("penalty", 0.0)
    return tuple(rewards[number] for number in takewhile(rewards.__contains__, count()))


def align(
    samples: Sequence[Sample], sizes: Mapping[str, int | None], *place: int | str
) -> list[Sample]:
    """The samples with `copies` such that each agent has `sizes[agent]` turns per task, where a size is given.

    M-GRPO (arXiv 2511.13288): sub-agents are called more often in one trajectory than in another; turns beyond the
    size are dropped at random, missing ones are made up by counting some more than once. `place` seeds the draw.
    """
    done = []
    for (_, agent), own in grouped(
        ((sample.task, sample.agent), sample) for sample in samples
    ).items():
        size = sizes.get(agent)
        if size is None:
            done += own
            continue
        order = sorted(
            own, key=lambda s: derive_seed(*place, "align", s.trajectory, s.node, s.turn)
        )
        each, more = divmod(size, len(own))
        done += [
            replace(s, copies=each + (i < more)) for i, s in enumerate(order) if each + (i < more)
        ]
    return done


def split(samples: Sequence[Sample], parts: int, *place: int | str) -> list[list[Sample]]:
    """The samples in at most `parts` parts of about equally many tasks; `place` seeds the draw.

    A task's turns stay together, so that their prompts are still computed once.
    """
    by_task = grouped((sample.task, sample) for sample in samples)
    tasks = sorted(by_task, key=lambda task: derive_seed(*place, "split", task))
    dealt = [[s for task in tasks[part::parts] for s in by_task[task]] for part in range(parts)]
    return [part for part in dealt if part]


def deal(samples: Sequence[Sample], turns: int, *place: int | str) -> list[list[Sample]]:
    """The samples in mini-batches of at most so many `turns`, drawn from all tasks; `place` seeds the draw."""
    order = sorted(samples, key=lambda s: derive_seed(*place, "deal", s.trajectory, s.node, s.turn))
    return [order[start : start + turns] for start in range(0, len(order), turns)]


def weigh(
    samples: Sequence[Sample],
    loss_weights: Mapping[str, float],
    aggregation: AggregationName = "token_mean",
    norm: float | None = None,
) -> list[Sample]:
    """One policy's samples with the weight of each of their tokens in an update, the denominator included.

    Agents of weight 0 are frozen: their samples are left out, of the denominator too.
    """
    trained = [sample for sample in samples if loss_weights[sample.agent]]
    if not trained:
        return []
    agents = {sample.agent for sample in trained} if AGGREGATIONS[aggregation].by_agent else {None}
    weights = torch.empty(len(trained), dtype=torch.float64)
    for agent in agents:
        own = [i for i, sample in enumerate(trained) if agent in (None, sample.agent)]
        copies = torch.tensor([trained[i].copies for i in own])
        lengths = torch.tensor([trained[i].tokens for i in own])
        each = token_weights(lengths.repeat_interleave(copies), mode=aggregation, norm=norm)
        weights[own] = each[copies.cumsum(0) - 1] * copies / len(agents)
    return [
        changed(sample, weight=loss_weights[sample.agent] * weight)
        for sample, weight in zip(trained, weights.tolist(), strict=True)
    ]
