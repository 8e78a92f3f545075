"""One policy's trainer: its specification; its samples are packed once a step, scored, and trained on."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from statistics import fmean

from torch import Tensor

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.credit.assign import penalise, reference_kl
from mcore_mas.credit.samples import Sample, align, mini_batches, split, weigh
from mcore_mas.equations.divergence import (
    GAP_BOUNDS,
    AdaptiveKL,
    describe_disagreement,
    is_gap_metric,
)
from mcore_mas.equations.losses import explained_variance
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.packing.pack import PackedSamples, tokens_saved
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.metrics import StepMetrics
from rollout.records.grouping import group_pairs


@dataclass(slots=True, kw_only=True)
class UpdateBatch:
    """What a policy learns from in one optimizer step, packed for its trainer and for its critic."""

    samples: list[Sample]
    packed: PackedSamples
    valued: PackedSamples  # for the critic; the same one where both have the same layout


class PolicyTrainer:
    """Trains one policy and, where it has one, its critic."""

    def __init__(
        self,
        policy: str,
        config: RunConfig,
        group: TrainerGroup,
        *,
        critic: TrainerGroup | None = None,
        kl: Mapping[str, float] | None = None,
    ) -> None:
        """`kl` is the coefficient of the KL term, if it adapts, as a checkpoint has it; None: the config's."""
        self._policy, self._config = policy, for_policy(config, policy)
        self._group, self._critic = group, critic
        self._aligned = {name: config.advantage_of(name).align for name in config.agents}
        self._precision = config.precision_of(policy)
        self._places = step_places(config, policy)
        self._lost = (
            0  # steps in a row in which no gradient was finite, so that every update was left out
        )
        self.kl: AdaptiveKL | None = None  # replaced in each step
        own = self._config.loss.kl
        if own.target is not None:
            start = AdaptiveKL(coefficient=own.coef, target=own.target, horizon=own.horizon)
            self.kl = AdaptiveKL(**kl) if kl else start

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """The trainer's ranks and the critic's, by name."""
        critic = {} if self._critic is None else {f"{self._policy}.critic": self._critic}
        return {self._policy: self._group, **critic}

    @property
    def kl_coef(self) -> float:
        """The factor of the KL term or penalty in this step."""
        return self.kl.coefficient if self.kl else self._config.loss.kl.coef

    def pack(self, samples: Sequence[Sample], step: int) -> list[UpdateBatch]:
        """The policy's samples, in as many parts as the step has updates; each is packed when it is first needed."""
        trainer, entropy = self._config.trainer, self._config.loss.entropy
        own = [replace(sample, entropy_coef=entropy) for sample in samples if self._learns(sample)]
        seed = self._config.seed
        if trainer.minibatch is not None:
            parts = mini_batches(own, trainer.minibatch, seed, step)
            return [self._batch(part) for part in parts]
        return [self._batch(part) for part in split(own, trainer.updates_per_step, seed, step)]

    def _learns(self, sample: Sample) -> bool:
        return sample.policy == self._policy and sample.tokens > 0

    def _batch(self, samples: list[Sample]) -> UpdateBatch:
        tokens = self._config.trainer.microbatch_tokens
        packed = PackedSamples(samples, tokens, self._group.cost_model)
        spread = self._critic is not None and self._critic.cost_model.spread
        valued = (
            PackedSamples(samples, tokens, self._critic.cost_model)
            if self._critic and spread
            else packed
        )
        return UpdateBatch(samples=samples, packed=packed, valued=valued)

    async def score(self, batches: Sequence[UpdateBatch]) -> None:
        """Add what the frozen reference and the critic say of the samples' tokens, where the policy asks for it."""
        kl, coef = self._config.loss.kl, self.kl_coef
        if coef and batches:
            rows = await _scores(
                [batch.packed for batch in batches], partial(self._group.score, reference=True)
            )
            for batch, own in zip(batches, rows, strict=True):
                batch.samples = [
                    replace(s, reference=row) for s, row in zip(batch.samples, own, strict=True)
                ]
                batch.samples = [
                    penalise(s, coef, kl.estimate)
                    if kl.where == "reward"
                    else replace(s, kl_coef=coef)
                    for s in batch.samples
                ]
        if self._critic is not None and batches:
            rows = await _scores([batch.valued for batch in batches], self._critic.score)
            for batch, own in zip(batches, rows, strict=True):
                batch.samples = [
                    replace(s, values=row) for s, row in zip(batch.samples, own, strict=True)
                ]

    async def update(
        self, batches: Sequence[UpdateBatch], credited: Sequence[Sample], step: int
    ) -> StepMetrics:
        """Train policy and critic on the samples with their advantages, an optimizer step for each batch.

        Raises:
            TrainingError: the trainer does not see the log-probabilities that the engine sampled with, or no gradient
                has been finite for `trainer.signal_within` steps.
        """
        config = self._config
        samples = align([s for s in credited if self._learns(s)], self._aligned, config.seed, step)
        weights = {name: agent.loss_weight for name, agent in config.agents.items()}
        loss = config.loss
        of = {sample.id: number for number, batch in enumerate(batches) for sample in batch.samples}
        parts = [
            weigh([s for s in samples if of[s.id] == number], weights, loss.aggregation, loss.norm)
            for number in range(len(batches))
        ]
        critic = config.policies[self._policy].critic
        waits = critic is not None and step < critic.head_start
        trained = [
            await _packed(batch.packed, [s for s in part if s.has_gradient and not waits])
            for batch, part in zip(batches, parts, strict=True)
        ]
        passes = config.trainer.passes
        scored = len(parts) * passes > 1 and config.loss.correction.name != "none"
        if scored:
            trained = [await self._with_proximal(microbatches) for microbatches in trained]
        rows = list[StepMetrics]()
        updates = list(zip(batches, parts, trained, strict=True)) * passes
        place = None if self._places is None else self._places[step]
        for number, (batch, part, microbatches) in enumerate(updates):
            row = await self._update_once(batch, part, microbatches, place)
            if (
                number < len(parts)
                if scored
                else all(earlier["skipped_updates"] for earlier in rows)
            ):
                self._check_agreement(row)
            else:  # seen in the first pass, or scored by weights that the earlier updates have changed
                row = {name: value for name, value in row.items() if not is_gap_metric(name)}
            rows.append(row)
        self._check_finite([row["grad_norm"] for row in rows if "grad_norm" in row], step)
        rows = rows or [{"skipped_updates": 1.0}]
        metrics = merge_updates(rows) | {
            "updates": len(rows) - sum(row["skipped_updates"] for row in rows)
        }
        if self.kl and samples:
            measured = reference_kl(samples, config.loss.kl.estimate)
            metrics |= {"reference_kl": measured, "kl_coef": self.kl.coefficient}
            self.kl = self.kl.update(measured, len(samples))
        return metrics

    async def _with_proximal(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """With the log-probabilities under the weights at the start of the step, which several updates leave behind."""
        scores = await self._group.score(microbatches)
        return [
            replace(batch, proximal=score)
            for batch, score in zip(microbatches, scores, strict=True)
        ]

    async def _update_once(
        self,
        batch: UpdateBatch,
        samples: Sequence[Sample],
        microbatches: list[Microbatch],
        at: int | None,
    ) -> StepMetrics:
        """One optimizer step of the policy beside one of the critic, at place `at` of their learning rates."""
        updates = [self._group.update(microbatches, at)] if microbatches else []
        if self._critic is not None:
            valued = await _packed(batch.valued, [s for s in samples if s.returns is not None])
            updates.append(_update_critic(self._critic, valued, at))
        counts = {
            "tokens_saved": tokens_saved(microbatches),
            "flops": self._group.cost_model.flops(*microbatches),
        }
        metrics = counts if microbatches else {"skipped_updates": 1.0}
        for own in await asyncio.gather(*updates):
            metrics |= own
        return metrics

    def _check_finite(self, norms: Sequence[float], step: int) -> None:
        """Count the steps in a row in which all of a step's gradient `norms` are not finite."""
        within = self._config.trainer.signal_within
        if norms:
            self._lost = 0 if any(map(math.isfinite, norms)) else self._lost + 1
        if within is not None and self._lost >= within:
            raise TrainingError(
                f"step {step}: no gradient of policy {self._policy} was finite in {self._lost} steps, so every update "
                "was left out; lower policies.<name>.lr, go back to an older checkpoint, or train it without bf16 "
                "(trainer.signal_within: null never stops)"
            )

    def _check_agreement(self, metrics: Mapping[str, float]) -> None:
        if found := describe_disagreement(
            metrics, GAP_BOUNDS[self._precision] | self._config.trainer.agreement
        ):
            raise TrainingError(
                f"policy {self._policy}, {found}, more than {self._precision} rounds; engine and trainer do not hold "
                "the same weights: keep engine.verify on to find the tensor, or, if their kernels are known to "
                "differ by as much, widen trainer.agreement"
            )


def step_places(config: RunConfig, policy: str) -> list[int] | None:
    """Where the updates of each step stand in the policy's schedule; None: where their own number says."""
    trainer = for_policy(config, policy).trainer
    trained = (int(policy in config.in_turn(step)) for step in range(trainer.steps))
    return [0, *accumulate(trained)] if trainer.minibatch else None


async def _packed(pack: PackedSamples, samples: Sequence[Sample]) -> list[Microbatch]:
    """`PackedSamples.training_microbatches`, which takes seconds for a large step: what is collected ahead goes on."""
    return await asyncio.to_thread(pack.training_microbatches, samples)


async def _scores(
    packs: Sequence[PackedSamples], score: Callable[[list[Microbatch]], Awaitable[list[Tensor]]]
) -> list[list[tuple[float, ...]]]:
    """What a model says of each completion token, by pack and sample, in one pass over all of them."""
    own = await asyncio.to_thread(
        lambda: [microbatch for pack in packs for microbatch in pack.microbatches]
    )
    scores = iter(await score(own))
    return [pack.unpack(islice(scores, len(pack.microbatches))) for pack in packs]


async def _update_critic(
    critic: TrainerGroup, microbatches: list[Microbatch], at: int | None
) -> StepMetrics:
    if not microbatches:
        return {}
    return critic_metrics(
        await critic.update(microbatches, at) | {"flops": critic.cost_model.flops(*microbatches)}
    )


def critic_metrics(metrics: Mapping[str, float]) -> StepMetrics:
    """A critic's metrics beside those of its policy, by agent and in all, with the variance of returns it explains."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        whose, _, what = name.rpartition("/")
        groups[whose][what] = value
    for own in groups.values():
        explained = explained_variance(own) if "return_squared" in own else math.nan
        if not math.isnan(explained):  # it is where all returns are equal
            own["explained_variance"] = explained
    return {
        f"{whose}/critic/{what}".lstrip("/"): value
        for whose, own in groups.items()
        for what, value in own.items()
    }


def merge_updates(rows: Sequence[Mapping[str, float]]) -> StepMetrics:
    """The metrics of a step's updates as one: extremes and counts by their names, everything else by its mean."""
    columns = group_pairs(item for row in rows for item in row.items())
    return {name: _reduction(name.rpartition("/")[2])(values) for name, values in columns.items()}


def _reduction(name: str) -> Callable[[Sequence[float]], float]:
    counted = ("grad_spikes", "skipped_updates", "tokens", "flops", "device_s", "peak_flops")
    if name in counted or name.endswith("_count"):
        return sum
    return max if name.endswith("_max") else min if name.endswith("_min") else fmean
