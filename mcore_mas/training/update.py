"""One policy's update: samples scored by reference and critic, weighed and trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcore_mas.credit.assign import penalise, reference_kl
from mcore_mas.credit.samples import Sample, align, split, weigh
from mcore_mas.packing.pack import tokens_saved, unpack
from mcore_mas.training.metrics import critic_metrics, merge_updates
from mcore_mas.training.session import Run, TrainingError


async def update(run: Run, policy: str, samples: list[Sample], step: int) -> dict[str, float]:
    """Train one policy and its critic on the policy's samples, and hand the new weights to its engine."""
    config = run.config
    sizes = {name: config.advantage_of(name).align for name in config.agents}
    samples = align(samples, sizes, config.seed, step)
    parts = split(samples, config.trainer.updates_per_step, config.seed, step)
    if len(parts) > 1 and config.loss.correction.name != "none":
        parts = [await _with_proximal(run, policy, part) for part in parts]
    rows = []
    for number, part in enumerate(parts):
        row = await _update_once(run, policy, part)
        if number == 0:  # later parts are scored by weights that the earlier ones have changed
            _check_agreement(run, policy, row)
        rows.append(row)
    rows = rows or [{"skipped_updates": 1.0}]
    metrics = merge_updates(rows) | {"updates": len(rows) - sum(row["skipped_updates"] for row in rows)}
    if policy in run.kl and samples:
        measured = reference_kl(samples, config.loss.kl.estimate)
        metrics |= {"reference_kl": measured, "kl_coef": run.kl[policy].coefficient}
        run.kl[policy] = run.kl[policy].update(measured, len(samples))
    if run.config.engine.sleep:
        await run.engines[policy].wake(("weights",))
    if "grad_norm" in metrics or run.config.engine.sleep:  # who slept has no weights
        metrics |= await run.weight_sync[policy].push(step + 1)
    return {name if name.startswith("agent/") else f"policy/{policy}/{name}": value for name, value in metrics.items()}


async def _with_proximal(run: Run, policy: str, samples: list[Sample]) -> list[Sample]:
    batches = run.packed(run.trainers[policy], samples)
    rows = unpack(batches, await run.trainers[policy].score(batches), samples)
    return [replace(sample, proximal=row) for sample, row in zip(samples, rows, strict=True)]


async def _update_once(run: Run, policy: str, samples: list[Sample]) -> dict[str, float]:
    config = run.config
    weights = {name: agent.loss_weight for name, agent in config.agents.items()}
    samples = weigh(samples, weights, config.loss.aggregation, config.loss.norm)
    # without an advantage, a KL term or an entropy bonus there is no gradient: leaving such a sample out changes
    # nothing but the time, as its tokens are in the denominator already
    trained = run.packed(
        run.trainers[policy], [s for s in samples if any(s.advantages or ()) or s.kl_coef or s.entropy_coef]
    )
    updates = [run.trainers[policy].update(trained)] if trained else []
    if policy in run.critics:
        updates.append(_update_critic(run, policy, [s for s in samples if s.returns is not None]))
    metrics = {"tokens_saved": tokens_saved(trained)} if trained else {"skipped_updates": 1.0}
    for own in await asyncio.gather(*updates):
        metrics |= own
    return metrics


async def _update_critic(run: Run, policy: str, samples: list[Sample]) -> dict[str, float]:
    valued = run.packed(run.critics[policy], samples)
    return critic_metrics(await run.critics[policy].update(valued) if valued else {})


def _check_agreement(run: Run, policy: str, metrics: Mapping[str, float]) -> None:
    tolerance = run.config.trainer.logprob_tolerance
    for name, gap in metrics.items():
        if name.endswith("/logprob_gap_max") and gap > tolerance:
            raise TrainingError(
                f"policy {policy}, {name.removesuffix('/logprob_gap_max')}: the trainer's log-probabilities differ "
                f"from the engine's by {gap:.2e}, more than trainer.logprob_tolerance {tolerance:.0e}; engine and "
                "trainer do not hold the same weights"
            )


async def score_samples(run: Run, samples: Sequence[Sample], trained: Sequence[str]) -> list[Sample]:
    """The samples with what the frozen reference and the critics say of their tokens, where a policy asks for it."""
    policies = sorted({sample.policy for sample in samples})
    judged = await asyncio.gather(
        *(_judged(run, name, [s for s in samples if s.policy == name]) for name in policies if name in trained)
    )
    return [s for s in samples if s.policy not in trained] + [sample for own in judged for sample in own]


async def _judged(run: Run, policy: str, samples: list[Sample]) -> list[Sample]:
    samples = [replace(sample, entropy_coef=run.config.loss.entropy) for sample in samples]
    kl, coef = run.config.loss.kl, run.kl_coef(policy)
    if not coef and policy not in run.critics:
        return samples
    if coef:
        batches = run.packed(run.trainers[policy], samples)
        rows = unpack(batches, await run.trainers[policy].score(batches, reference=True), samples)
        samples = [replace(sample, reference=row) for sample, row in zip(samples, rows, strict=True)]
        if kl.where == "reward":
            samples = [penalise(sample, coef, kl.estimate) for sample in samples]
        else:
            samples = [replace(sample, kl_coef=coef) for sample in samples]
    if policy in run.critics:
        batches = run.packed(run.critics[policy], samples)
        rows = unpack(batches, await run.critics[policy].score(batches), samples)
        samples = [replace(sample, values=row) for sample, row in zip(samples, rows, strict=True)]
    return samples
