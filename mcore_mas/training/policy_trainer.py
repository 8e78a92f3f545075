"""Trainer of one policy: pack its samples once per step, score them, and update the weights."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.credit.assign import penalise, reference_kl, teacher_kl
from mcore_mas.credit.samples import (
    Sample,
    TurnId,
    align,
    mini_batches,
    split,
    weigh,
    with_proximal,
)
from mcore_mas.equations.agreement import GAP_BOUNDS, describe_disagreement, is_gap_metric
from mcore_mas.equations.balance import gradient_shares
from mcore_mas.equations.kl import AdaptiveKL
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.packing.pack import PackedSamples, saved_token_share
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.trainer_group import TrainerGroup
from mcore_mas.training.metrics import StepMetrics, critic_metrics, merge_updates
from rollout.models.grammars import Grammars
from rollout.records.trajectory import step_label


@dataclass(slots=True, kw_only=True)
class UpdateBatch:
    """Samples of one optimizer step of a policy, packed for its trainer and for its critic.

    Attributes:
        samples: samples of the policy, all with tokens that carry loss. `score` replaces them by
            samples with scores.
        packed: micro-batches for the trainer.
        critic_packed: micro-batches for the critic; the same object as `packed` unless the
            critic's ranks need another layout.
    """

    samples: list[Sample]
    packed: PackedSamples
    critic_packed: PackedSamples


class PolicyTrainer:
    """Trainer of one policy and of its critic, if it has one.

    A step calls `make_batches`, `score` and `update`, in this order.

    Attributes:
        kl: adaptive coefficient of the KL term, replaced in every step; None if the coefficient
            is constant.
    """

    def __init__(
        self,
        policy: str,
        config: RunConfig,
        group: TrainerGroup,
        *,
        critic: TrainerGroup | None = None,
        kl: Mapping[str, float] | None = None,
    ) -> None:
        """Store the parts of the trainer; the ranks of `group` and `critic` may still be starting.

        Args:
            policy: name of the policy.
            config: config of the run.
            group: ranks of the policy.
            critic: ranks of its critic.
            kl: fields of the adaptive KL coefficient from a checkpoint; None starts it as the
                config says.
        """
        self._policy = policy
        self._config = for_policy(config, policy)
        self._group = group
        self._critic = critic
        self._loss_weights = config.trained_agents(policy)
        # Number of turns per task to which an agent's turns are aligned; None: they are not.
        self._turns_per_task = {name: config.advantage_of(name).align for name in config.agents}
        self._grammars = Grammars(config.models[policy])
        self._precision = config.precision_of(policy)
        self._schedule_positions = schedule_positions(config, policy)
        # Versions whose weights the trainer retains, the oldest first, and their largest number.
        self._retained_versions: list[int] = []
        self._max_retained = 0
        if self._config.loss.scores_with_sampling_weights:
            self._max_retained = config.staleness_of(policy)
        # Number of steps in a row without any finite gradient, whose updates were all skipped.
        self._steps_without_gradient = 0

        self.kl: AdaptiveKL | None = None
        kl_config = self._config.loss.kl
        if kl_config.target is not None:
            if kl:
                self.kl = AdaptiveKL(**kl)
            else:
                self.kl = AdaptiveKL(
                    coefficient=kl_config.coef,
                    target=kl_config.target,
                    horizon=kl_config.horizon,
                )

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """Ranks of the policy and of its critic, by the name of their folder in a checkpoint."""
        groups = {self._policy: self._group}
        if self._critic is not None:
            groups[f"{self._policy}.critic"] = self._critic
        return groups

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL term or penalty in this step."""
        return self.kl.coefficient if self.kl else self._config.loss.kl.coef

    def make_batches(self, samples: Sequence[Sample], step: int) -> list[UpdateBatch]:
        """Split the policy's trained samples of a step into one batch per optimizer step.

        Also sets the entropy coefficient of the samples. Each batch is packed into micro-batches when
        these are first needed (`PackedSamples`).
        """
        trainer = self._config.trainer
        seed = self._config.seed
        entropy_coef = self._config.loss.entropy
        policy_samples = [
            replace(sample, entropy_coef=entropy_coef)
            for sample in samples
            if self._is_trained(sample)
        ]
        if trainer.minibatch is not None:
            parts = mini_batches(policy_samples, trainer.minibatch, seed, step)
        else:
            parts = split(policy_samples, trainer.updates_per_step, seed, step)
        return [self._make_batch(part) for part in parts]

    def _is_trained(self, sample: Sample) -> bool:
        return sample.policy == self._policy and sample.trained_tokens > 0

    def _make_batch(self, samples: list[Sample]) -> UpdateBatch:
        max_tokens = self._config.trainer.microbatch_tokens
        packed = PackedSamples(samples, max_tokens, self._group.cost_model, self._grammars)
        critic_packed = packed
        # If several data-parallel ranks or pipeline stages share the critic's work, the number of
        # its micro-batches depends on theirs. Otherwise the critic takes those of the trainer.
        if self._critic is not None and self._critic.cost_model.is_distributed:
            critic_packed = PackedSamples(
                samples, max_tokens, self._critic.cost_model, self._grammars
            )
        return UpdateBatch(samples=samples, packed=packed, critic_packed=critic_packed)

    async def score(self, batches: Sequence[UpdateBatch], version: int = 0) -> None:
        """Set reference log-probabilities and the critic's values of all samples, as configured.

        With a KL penalty in the reward, also set the penalty of each token; with a KL term in the
        loss, its coefficient. With `loss.old_policy: sampled`, also set the log-probabilities of
        tokens that older weights sampled.

        Args:
            batches: batches that `make_batches` returned.
            version: version of the present weights.
        """
        if not batches:
            return

        if self._max_retained:
            await self._score_at_versions(batches, version)
            await self._group.keep_version(version, self._max_retained)
            versions = dict.fromkeys([*self._retained_versions, version])
            self._retained_versions = list(versions)[-self._max_retained :]

        if self.kl_coef:
            rows_by_batch = await _score_packed(
                [batch.packed for batch in batches], partial(self._group.score, reference=True)
            )
            for batch, rows in zip(batches, rows_by_batch, strict=True):
                batch.samples = [
                    self._with_reference(sample, row)
                    for sample, row in zip(batch.samples, rows, strict=True)
                ]

        if self._critic is not None:
            rows_by_batch = await _score_packed(
                [batch.critic_packed for batch in batches], self._critic.score
            )
            for batch, rows in zip(batches, rows_by_batch, strict=True):
                batch.samples = [
                    replace(sample, values=row)
                    for sample, row in zip(batch.samples, rows, strict=True)
                ]

    async def _score_at_versions(self, batches: Sequence[UpdateBatch], present: int) -> None:
        """Set `proximal` of tokens that older weights than the present ones sampled, under those weights.

        After a restart the trainer has no older weights. Then the engine's log-probabilities take the
        place of the trainer's.
        """
        samples = {sample.id: sample for batch in batches for sample in batch.samples}
        older = {span.version for sample in samples.values() for span in sample.version_spans}
        for version in sorted(older - {present}):
            at_version = [
                sample
                for sample in samples.values()
                if version in {span.version for span in sample.version_spans}
            ]
            rows: Sequence[tuple[float, ...] | None] = [sample.behaviour for sample in at_version]
            if version in self._retained_versions:
                max_tokens = self._config.trainer.microbatch_tokens
                packed = PackedSamples(
                    at_version, max_tokens, self._group.cost_model, self._grammars
                )
                score = partial(self._group.score, version=version)
                (rows,) = await _score_packed([packed], score)
            for sample, row in zip(at_version, rows, strict=True):
                samples[sample.id] = with_proximal(sample, version, row)
        for batch in batches:
            batch.samples = [samples[sample.id] for sample in batch.samples]

    def _with_reference(self, sample: Sample, reference: tuple[float, ...]) -> Sample:
        """Set the reference log-probabilities of a sample, and its KL penalty or coefficient."""
        kl_config = self._config.loss.kl
        sample = replace(sample, reference=reference)
        if kl_config.where == "reward":
            return penalise(sample, self.kl_coef, kl_config.estimate)
        return replace(sample, kl_coef=self.kl_coef)

    async def update(
        self, batches: Sequence[UpdateBatch], credited: Sequence[Sample], step: int
    ) -> StepMetrics:
        """Take one optimizer step per batch and pass, for the policy and its critic.

        Args:
            batches: batches that `make_batches` returned.
            credited: samples of the step with advantages, those of other policies included.
            step: number of the training step.

        Raises:
            TrainingError: the trainer does not compute the log-probabilities that the engine
                sampled with, or no gradient has been finite for `trainer.signal_within` steps.
        """
        config = self._config
        samples = align(
            [sample for sample in credited if self._is_trained(sample)],
            self._turns_per_task,
            config.seed,
            step,
        )
        weighed = self._weigh_by_batch(batches, samples)
        microbatches = await self._microbatches_to_train(batches, weighed, step)

        # With several updates and a correction, all batches are scored by the weights at the start
        # of the step.
        corrects = len(batches) * config.trainer.passes > 1 and (
            config.loss.correction.name != "none"
        )
        if corrects:
            microbatches = [await self._with_proximal(batch) for batch in microbatches]

        position = None
        if self._schedule_positions is not None:
            position = self._schedule_positions[step]

        rows: list[StepMetrics] = []
        updates = list(zip(batches, weighed, microbatches, strict=True)) * config.trainer.passes
        for number, (batch, batch_samples, batch_microbatches) in enumerate(updates):
            row = await self._update_once(batch, batch_samples, batch_microbatches, position)
            # The trainer's log-probabilities can be compared with the engine's only if both are of
            # the same weights. This holds until an update changes the trainer's weights. With a
            # correction it holds for the whole first pass, whose proximal log-probabilities are of
            # the weights at the start of the step.
            weights_are_unchanged = all(earlier["skipped_updates"] for earlier in rows)
            compares_engine = number < len(batches) if corrects else weights_are_unchanged
            if compares_engine:
                self._check_agreement(row)
            else:
                row = {name: value for name, value in row.items() if not is_gap_metric(name)}
            rows.append(row)
        self._check_finite([row["grad_norm"] for row in rows if "grad_norm" in row], step)

        if not rows:
            rows = [{"skipped_updates": 1.0}]
        metrics = merge_updates(rows)
        metrics["updates"] = len(rows) - sum(row["skipped_updates"] for row in rows)
        scored = [sample for sample in samples if sample.teacher is not None]
        if scored:
            metrics["teacher_kl"] = teacher_kl(scored)
        if self.kl and samples:
            measured = reference_kl(samples, config.loss.kl.estimate)
            metrics["reference_kl"] = measured
            metrics["kl_coef"] = self.kl.coefficient
            self.kl = self.kl.update(measured, len(samples))
        return metrics

    def _weigh_by_batch(
        self, batches: Sequence[UpdateBatch], samples: Sequence[Sample]
    ) -> list[list[Sample]]:
        """Sort samples into their batches, and weight their tokens for the batch's update.

        Args:
            batches: batches of the step; a sample is sorted into the batch that has its id.
            samples: all samples of the batches, with advantages.

        Returns:
            Weighted samples of each batch.
        """
        loss = self._config.loss
        loss_weights = {name: agent.loss_weight for name, agent in self._config.agents.items()}
        batch_numbers: dict[TurnId, int] = {}
        for number, batch in enumerate(batches):
            for sample in batch.samples:
                batch_numbers[sample.id] = number

        samples_by_batch: list[list[Sample]] = [[] for _ in batches]
        for sample in samples:
            samples_by_batch[batch_numbers[sample.id]].append(sample)
        return [
            weigh(batch_samples, loss_weights, loss.aggregation, loss.norm)
            for batch_samples in samples_by_batch
        ]

    async def _microbatches_to_train(
        self, batches: Sequence[UpdateBatch], weighed: Sequence[list[Sample]], step: int
    ) -> list[list[Microbatch]]:
        """Return each batch's micro-batches to train; none while the critic has a head start."""
        critic = self._config.policies[self._policy].critic
        is_frozen = critic is not None and step < critic.head_start
        result = []
        for batch, samples in zip(batches, weighed, strict=True):
            trained = [sample for sample in samples if sample.has_gradient and not is_frozen]
            result.append(await _pack_in_thread(batch.packed, trained))
        return result

    async def _with_proximal(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """Return the micro-batches with `proximal` of all tokens.

        Tokens that have none get the log-probability under the weights at the start of the step.
        """
        scores = await self._group.score(microbatches)
        result = []
        for microbatch, score in zip(microbatches, scores, strict=True):
            proximal = score
            if microbatch.proximal is not None:
                is_unknown = microbatch.proximal.isnan()
                proximal = torch.where(is_unknown, score, microbatch.proximal)
            result.append(replace(microbatch, proximal=proximal))
        return result

    async def _update_once(
        self,
        batch: UpdateBatch,
        samples: Sequence[Sample],
        microbatches: list[Microbatch],
        position: int | None,
    ) -> StepMetrics:
        """Take one optimizer step of the policy and one of the critic, side by side.

        Args:
            batch: batch whose samples are trained.
            samples: samples of the batch, with returns for the critic.
            microbatches: micro-batches of the policy; [] if no sample has a gradient.
            position: position in the learning rate schedules; None: the number of updates so far.
        """
        metrics: StepMetrics = {"skipped_updates": 1.0}
        updates = []
        if microbatches:
            metrics = {
                "tokens_saved": saved_token_share(microbatches),
                "flops": self._group.cost_model.flops(*microbatches),
            }
            updates.append(self._group.update(microbatches, position))
        if self._critic is not None:
            critic_samples = [sample for sample in samples if sample.returns is not None]
            critic_microbatches = await _pack_in_thread(batch.critic_packed, critic_samples)
            updates.append(_update_critic(self._critic, critic_microbatches, position))
        for update_metrics in await asyncio.gather(*updates):
            metrics |= update_metrics
        return metrics | self._gradient_shares(metrics)

    def _gradient_shares(self, metrics: Mapping[str, float]) -> StepMetrics:
        """Return the share of each agent in the gradient of an update, if several agents train the policy.

        An agent without a gradient in this update has a share of 0.
        """
        if len(self._loss_weights) < 2:
            return {}
        norms = {
            agent: metrics.get(f"agent/{agent}/grad_norm", 0.0) for agent in self._loss_weights
        }
        is_balanced = self._config.loss.balance == "agents"
        shares = gradient_shares(norms, self._loss_weights if is_balanced else None)
        return {f"agent/{agent}/gradient_share": share for agent, share in shares.items()}

    def _check_finite(self, grad_norms: Sequence[float], step: int) -> None:
        """Raise TrainingError if no gradient has been finite for `trainer.signal_within` steps.

        Args:
            grad_norms: gradient norms of the updates of this step; [] if there was no update, which
                leaves the number of such steps as it is.
            step: number of the training step.
        """
        limit = self._config.trainer.signal_within
        if grad_norms:
            if any(map(math.isfinite, grad_norms)):
                self._steps_without_gradient = 0
            else:
                self._steps_without_gradient += 1
        if limit is not None and self._steps_without_gradient >= limit:
            raise TrainingError(
                f"{step_label(step)}: no gradient of policy {self._policy} was finite in "
                f"{self._steps_without_gradient} steps, so every update was skipped; lower "
                f"policies.{self._policy}.lr, go back to an older checkpoint, or train it without bf16 "
                "(trainer.signal_within: null never stops)"
            )

    def _check_agreement(self, metrics: Mapping[str, float]) -> None:
        """Raise TrainingError if log-probabilities of trainer and engine differ too much."""
        bounds = GAP_BOUNDS[self._precision] | self._config.trainer.agreement
        disagreement = describe_disagreement(metrics, bounds)
        if disagreement:
            raise TrainingError(
                f"policy {self._policy}, {disagreement}, which is more than the rounding error of "
                f"{self._precision}; engine and trainer do not hold the same weights: try "
                "engine.transport: disk, and check the model; with several SGLang servers, "
                "engine.compare_servers finds a tensor in which they differ. If the kernels of engine "
                "and trainer are known to differ by as much, widen trainer.agreement"
            )


def schedule_positions(config: RunConfig, policy: str) -> list[int] | None:
    """Return the position of each step's updates in the policy's learning rate schedule.

    With `trainer.minibatch` a step has any number of updates, and the schedule advances once per
    step that trains the policy. Otherwise the schedule advances with every update, and the result
    is None.

    Returns:
        Position by step: the number of earlier steps that train the policy.
    """
    trainer = for_policy(config, policy).trainer
    if not trainer.minibatch:
        return None
    trains_policy = [int(policy in config.in_turn(step)) for step in range(trainer.steps)]
    return list(accumulate(trains_policy, initial=0))


async def _pack_in_thread(packed: PackedSamples, samples: Sequence[Sample]) -> list[Microbatch]:
    """Call `PackedSamples.training_microbatches` in a thread.

    Packing takes seconds for a large step, and the event loop collects other steps meanwhile.
    """
    return await asyncio.to_thread(packed.training_microbatches, samples)


async def _score_packed(
    packs: Sequence[PackedSamples], score: Callable[[list[Microbatch]], Awaitable[list[Tensor]]]
) -> list[list[tuple[float, ...]]]:
    """Score all packs in one call.

    Returns:
        For each pack and each of its samples, one number per completion token.
    """

    def all_microbatches() -> list[Microbatch]:
        return [microbatch for packed in packs for microbatch in packed.microbatches]

    # The first access packs, which takes seconds for a large step.
    microbatches = await asyncio.to_thread(all_microbatches)
    scores = iter(await score(microbatches))
    return [packed.unpack(islice(scores, len(packed.microbatches))) for packed in packs]


async def _update_critic(
    critic: TrainerGroup, microbatches: list[Microbatch], position: int | None
) -> StepMetrics:
    """Take one optimizer step of a critic; return its metrics, {} without micro-batches."""
    if not microbatches:
        return {}
    metrics = await critic.update(microbatches, position)
    metrics["flops"] = critic.cost_model.flops(*microbatches)
    return critic_metrics(metrics)
