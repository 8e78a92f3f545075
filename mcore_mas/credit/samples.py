"""Training samples: one per turn, with the weight of each of its tokens in an update."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mcore_mas.equations.losses import AGGREGATIONS, AggregationName, token_weights
from rollout.records.grouping import group_pairs
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import REPLAY_OUTCOME, Group, Status, Turn, VersionSpan

TurnId = tuple[str, str, int]  # trajectory, node and turn number identify a turn within a step


class CreditError(ValueError):
    """Error in rewards or advantages of a step; the message names the trajectory or the step, if one is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn as training tokens of its policy, with P prompt tokens and C completion tokens.

    Log-probabilities are natural logarithms after temperature; None means unknown.

    Attributes:
        policy, agent, task, trajectory, turn: origin of the turn.
        round: number of the turn's round, as in `Turn`.
        node: branch numbers from the root of a tree, joined by "."; "1", "2" and so on for alternatives;
            "" for other turns.
        state: digest of the environment's description of its present state, without history; or of the
            agent's prompt if the environment describes no state.
        version: oldest version of the weights that sampled any token.
        versions: versions that sampled the tokens; (): `version` sampled all of them.
        age: number of weight updates between `version` and the weights being trained.
        prompt_ids: [P].
        completion_ids: [C].
        trained: [C] loss mask, True where a token carries loss; None if all do.
        temperature: temperature of sampling.
        reward: reward of the turn.
        scores: measurements of the turn by name.
        step_rewards: rewards of the trajectory's environment steps, summed over each round; see the
            function `step_rewards`.
        copies: number of times that the sample counts in the loss, set by `align`.
        weight: factor of each token's loss. It is 1 until `weigh` sets it to the loss weight times
            `copies`, divided by the number of tokens or replies that the update averages over.
        kl_coef: factor of the KL term in the loss.
        entropy_coef: factor of the entropy bonus.
        behaviour: [C] log-probabilities of the sampler.
        proximal: [C] log-probabilities under π_old; NaN or None: π_old has the weights at the start of
            the step.
        reference: [C] log-probabilities under the frozen reference.
        teacher: [C] log-probabilities under the policy's teacher.
        penalties: [C] subtracted from the reward token by token.
        values: [C] the critic's value before each token.
        returns: [C] the critic's targets.
        advantages: [C]; () or None if all tokens of the reply are masked.
        routing: [P + C - 1, ...] experts that the sampler chose, as in `Completion`.
        grammar: grammar that constrained the sampling, as in `Sampling`.
    """

    policy: str
    agent: str
    task: str
    trajectory: str
    turn: int
    round: int = 0
    node: str = ""
    state: str = ""
    version: int = 0
    versions: tuple[VersionSpan, ...] = ()
    age: int = 0
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    trained: tuple[bool, ...] | None = None
    temperature: float = 1.0
    reward: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    copies: int = 1
    weight: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    behaviour: tuple[float, ...] | None = None
    proximal: tuple[float, ...] | None = None
    reference: tuple[float, ...] | None = None
    teacher: tuple[float, ...] | None = None
    penalties: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    routing: bytes = b""
    grammar: str = ""

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return len(self.completion_ids) if self.trained is None else sum(self.trained)

    @property
    def id(self) -> TurnId:
        """Identity of the turn within a step."""
        return self.trajectory, self.node, self.turn

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Spans of the completion, each sampled by one version of the weights."""
        whole = VersionSpan(version=self.version, start=0, end=len(self.completion_ids))
        return self.versions or (whole,)

    @property
    def is_alternative(self) -> bool:
        """True if the turn is an alternative reply, which the trajectory did not continue with.

        Replays of the estimator C3 score alternatives to a turn's reply.
        """
        return REPLAY_OUTCOME in self.scores

    @property
    def has_gradient(self) -> bool:
        """True if the sample changes its policy: by an advantage, a KL term or an entropy bonus."""
        has_loss = any(self.advantages or ()) or bool(self.kl_coef or self.entropy_coef)
        return self.trained_tokens > 0 and has_loss


def to_samples(groups: Iterable[Group]) -> list[Sample]:
    """Return one sample per turn of every completed trajectory.

    Masked turns without a reward are left out. A masked turn with a reward counts in the statistics
    of its peers, but none of its tokens carries loss; the same holds for an empty reply.

    Raises:
        CreditError: a turn has no finite reward, or a trajectory is of another task than its group.
    """
    samples = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.task_id != group.task.id:
                raise CreditError(
                    f"trajectory {trajectory.id}: its task is {trajectory.task_id}, but its group's "
                    f"task is {group.task.id}"
                )
            if trajectory.status is not Status.COMPLETED:
                continue
            rewards_of_steps = step_rewards(trajectory.path)
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
                        versions=turn.versions,
                        prompt_ids=turn.prompt_ids,
                        completion_ids=turn.completion_ids,
                        trained=(False,) * len(turn.completion_ids) if turn.masked else None,
                        behaviour=turn.logprobs,
                        temperature=turn.temperature,
                        reward=turn.reward,
                        scores=turn.scores,
                        step_rewards=rewards_of_steps,
                        routing=turn.routing,
                        grammar=turn.grammar,
                    )
                )
    return samples


def step_rewards(turns: Collection[Turn]) -> tuple[float, ...]:
    """Return the reward of each round: that of its environment steps, with penalties.

    The turns' `penalty` scores, which are amounts to add, are added to the reward of their round, as in
    Dr. MAS's GiGPO. The result ends before the first round without a step.
    """
    # The score "team" of every turn of a round is the sum of the rewards of the round's steps.
    rewards = {turn.round: turn.scores["team"] for turn in turns if "team" in turn.scores}
    for turn in turns:
        if turn.round in rewards:
            rewards[turn.round] += turn.scores.get("penalty", 0.0)

    consecutive: list[float] = []
    while len(consecutive) in rewards:
        consecutive.append(rewards[len(consecutive)])
    return tuple(consecutive)


def with_proximal(sample: Sample, version: int, logprobs: Sequence[float] | None) -> Sample:
    """Set `proximal` of the tokens that one version of the weights sampled.

    Args:
        sample: sample whose `proximal` may be set already for tokens of other versions.
        version: version of the weights.
        logprobs: [C] log-probabilities of all tokens under these weights; None: the sample is returned
            unchanged.
    """
    if logprobs is None:
        return sample
    proximal = list(sample.proximal or (math.nan,) * len(sample.completion_ids))
    for span in sample.version_spans:
        if span.version == version:
            proximal[span.start : span.end] = logprobs[span.start : span.end]
    return replace(sample, proximal=tuple(proximal))


def align(
    samples: Sequence[Sample], sizes: Mapping[str, int | None], *seed_path: int | str
) -> list[Sample]:
    """Set `copies` such that each agent has `sizes[agent]` turns per task; None keeps all turns of the agent.

    M-GRPO (arXiv 2511.13288): sub-agents are called more often in some trajectories than in others.
    Turns beyond the size are dropped at random; missing turns are replaced by counting some turns
    more than once.

    Args:
        samples: turns of a step.
        sizes: turns per task, by agent.
        seed_path: seeds the random order.
    """
    result: list[Sample] = []
    turns_of = group_pairs(((sample.task, sample.agent), sample) for sample in samples)
    for (_, agent), turns in turns_of.items():
        size = sizes.get(agent)
        if size is None:
            result += turns
            continue
        order = sorted(
            turns,
            key=lambda turn: derive_seed(
                *seed_path, "align", turn.trajectory, turn.node, turn.turn
            ),
        )
        copies, remainder = divmod(size, len(turns))
        for index, sample in enumerate(order):
            sample_copies = copies + 1 if index < remainder else copies
            if sample_copies:
                result.append(replace(sample, copies=sample_copies))
    return result


def split(samples: Sequence[Sample], parts: int, *seed_path: int | str) -> list[list[Sample]]:
    """Split samples into at most `parts` parts with about equally many tasks, in an order seeded by `seed_path`.

    All turns of a task stay together, so that their common prompts are computed once.
    """
    by_task = group_pairs((sample.task, sample) for sample in samples)
    tasks = sorted(by_task, key=lambda task: derive_seed(*seed_path, "split", task))
    result = []
    for part in range(parts):
        part_samples: list[Sample] = []
        for task in tasks[part::parts]:
            part_samples += by_task[task]
        if part_samples:
            result.append(part_samples)
    return result


def mini_batches(
    samples: Sequence[Sample], turns: int, *seed_path: int | str
) -> list[list[Sample]]:
    """Split samples into mini-batches of at most `turns` turns, in an order seeded by `seed_path`."""
    order = sorted(
        samples,
        key=lambda sample: derive_seed(
            *seed_path, "deal", sample.trajectory, sample.node, sample.turn
        ),
    )
    return [order[start : start + turns] for start in range(0, len(order), turns)]


def weigh(
    samples: Sequence[Sample],
    loss_weights: Mapping[str, float],
    aggregation: AggregationName = "token_mean",
    norm: float | None = None,
) -> list[Sample]:
    """Set `weight` of each sample: the factor of its token losses in an update of its policy.

    The weight includes the division by the aggregation's denominator, so the update's loss is the sum of weight times
    token loss over all tokens.
    Agents with loss weight 0 are frozen: their samples are dropped, and do not count in the denominator.

    Args:
        samples: samples of one policy.
        loss_weights: loss weight of each agent.
        aggregation: name in `AGGREGATIONS`.
        norm: the constant length, in tokens, by which some aggregations divide; None for the others.
    """
    trained = [sample for sample in samples if loss_weights[sample.agent]]
    if not trained:
        return []
    groups = [list(range(len(trained)))]
    if AGGREGATIONS[aggregation].by_agent:
        indices_of_agent = group_pairs((sample.agent, i) for i, sample in enumerate(trained))
        groups = list(indices_of_agent.values())

    weights = torch.empty(len(trained), dtype=torch.float64)
    for indices in groups:
        copies = torch.tensor([trained[i].copies for i in indices])
        lengths = torch.tensor([trained[i].trained_tokens for i in indices])
        copy_weights = token_weights(lengths.repeat_interleave(copies), mode=aggregation, norm=norm)
        # All copies of a sample have the same weight; take that of its last copy.
        last_copy = copies.cumsum(0) - 1
        weights[indices] = copy_weights[last_copy] * copies / len(groups)
    return [
        replace(sample, weight=loss_weights[sample.agent] * weight)
        for sample, weight in zip(trained, weights.tolist(), strict=True)
    ]
