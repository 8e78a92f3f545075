"""What the frozen reference and the critics say of a step's tokens, before advantages are estimated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from mcore_mas.credit import penalise
from mcore_mas.packing import unpack
from mcore_mas.run import Run
from mcore_mas.samples import Sample


async def judge(run: Run, samples: Sequence[Sample], trained: Sequence[str]) -> list[Sample]:
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
