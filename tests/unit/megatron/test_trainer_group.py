"""A trainer spread over Ray actors does what it does in one process."""

import asyncio
from pathlib import Path

import pytest
import torch

from mcore_mas.megatron.step.trainer_group import TrainerGroup
from mcore_mas.packing.pack import pack, unpack
from mcore_mas.rollout.models.tensors import read_tensors
from mcore_mas.rollout.sync import SyncRoute
from tests.support import precision, ranks, reference


@pytest.mark.multirank
@pytest.mark.slow
def test_two_data_parallel_actors_score_train_and_export(running_ray: None, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path / "model")
    samples = reference.make_samples()
    batches = pack(samples, 12)

    async def play() -> tuple[list[torch.Tensor], dict[str, float], list[torch.Tensor], dict[str, torch.Tensor]]:
        group = TrainerGroup("p", ranks.spec_of(str(tmp_path / "model"), dp=2), threads=1)
        await group.ready()
        start = await group.score(batches)
        metrics = await group.update(batches)
        frozen = await group.score(batches, reference=True)
        route = SyncRoute(transport="disk", place=str(tmp_path / "sent"), model=str(tmp_path / "model"))
        handover = await group.export(route, 1)
        weights = dict(read_tensors(Path(handover.place)))
        return start, metrics, frozen, weights

    start, metrics, frozen, weights = asyncio.run(play())
    precision.assert_scores([torch.tensor(row) for row in unpack(batches, start, samples)], model, samples)
    assert all(map(torch.equal, frozen, start))
    expected = precision.expect(model, samples, 1, ranks.LR)
    (step,) = expected.steps
    assert metrics["grad_norm"] == pytest.approx(step["norm"], rel=precision.bound(expected.own.norm))
    assert precision.gap(weights, step["parameters"]) <= precision.bound(expected.own.parameters)
