"""A trainer spread over Ray actors does what it does in one process."""

import asyncio
from pathlib import Path

import pytest
import torch

from mcore_mas.megatron.gang import Gang
from mcore_mas.packing import pack, unpack
from rollout.engines.decoder import read_folder
from rollout.transports.handover import Route
from tests.support import ranks, reference


@pytest.mark.multirank
@pytest.mark.slow
def test_two_data_parallel_actors_score_train_and_export(running_ray: None, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path / "model")
    samples = reference.make_samples()
    batches = pack(samples, 12)
    with torch.no_grad():
        expected = [reference.logprobs_of(model, sample) for sample in samples]

    async def play() -> tuple[list[torch.Tensor], dict[str, float], list[torch.Tensor], dict[str, torch.Tensor]]:
        gang = Gang("p", ranks.spec_of(str(tmp_path / "model"), dp=2), threads=1)
        await gang.ready()
        start = await gang.score(batches)
        metrics = await gang.update(batches)
        frozen = await gang.score(batches, reference=True)
        route = Route(transport="disk", place=str(tmp_path / "sent"), model=str(tmp_path / "model"))
        handover = await gang.export(route, 1)
        weights = dict(read_folder(Path(handover.place)))
        return start, metrics, frozen, weights

    start, metrics, frozen, weights = asyncio.run(play())
    for sample, row, want in zip(samples, unpack(batches, start, samples), expected, strict=True):
        trained = torch.tensor(sample.trained or (True,) * len(sample.completion_ids))
        assert torch.allclose(torch.tensor(row)[trained], want[trained], rtol=0, atol=5e-6)
    assert all(map(torch.equal, frozen, start))
    (step,) = reference.train(model, samples, 1, ranks.LR)
    assert metrics["grad_norm"] == pytest.approx(step["norm"], rel=4e-6)
    for name, parameter in step["parameters"].items():
        assert torch.allclose(weights[name], parameter, rtol=0, atol=2e-6), name
