"""A trainer on several Ray actors gives the results of one process."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mcore_mas.packing.pack import pack, unpack
from mcore_mas.runtime.trainer_group import TrainerGroup
from rollout.models.tensors import read_tensors
from rollout.sync.transport import SyncRoute
from tests.support import precision, ranks, reference


@dataclass(frozen=True)
class Results:
    """Results of a group before and after one update."""

    scores: list[torch.Tensor]
    metrics: dict[str, float]
    reference_scores: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


@pytest.mark.multirank
@pytest.mark.slow
def test_two_data_parallel_actors_score_train_and_export(running_ray: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = reference.make_model("qwen2", folder)
    samples = reference.make_samples()
    batches = pack(samples, 12)

    async def run() -> Results:
        group = TrainerGroup("p", ranks.make_spec(str(folder), dp=2), threads=1)
        await group.ready()
        scores = await group.score(batches)
        metrics = await group.update(batches)
        reference_scores = await group.score(batches, reference=True)
        route = SyncRoute(transport="disk", target=str(tmp_path / "sent"), model=str(folder))
        update = await group.send_weights(route, 1)
        weights = dict(read_tensors(Path(update.location)))
        return Results(scores, metrics, reference_scores, weights)

    results = asyncio.run(run())
    rows = unpack(batches, results.scores, samples)
    precision.assert_scores([torch.tensor(row) for row in rows], model, samples)
    assert all(map(torch.equal, results.reference_scores, results.scores))
    assert results.metrics["device_s"] > 0
    assert "peak_flops" not in results.metrics  # the peak of a CPU is not known

    expected = precision.expect(model, samples, 1, ranks.LR)
    [step] = expected.steps
    norm_bound = precision.bound(expected.float32.norm)
    assert results.metrics["grad_norm"] == pytest.approx(step["norm"], rel=norm_bound)
    gap = precision.gap(results.weights, step["parameters"])
    assert gap <= precision.bound(expected.float32.parameters)
