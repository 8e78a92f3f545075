"""Weights that reach the engine from every layout, and engines that survive failed updates."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.architecture import read_architecture
from rollout.models.tensors import checksum, read_tensors
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights
from rollout.sync.transport import SyncRoute, make_sender
from tests.support import ranks, reference

# Tensor-parallel, pipeline and data-parallel ranks.
LAYOUTS = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1)]


@pytest.mark.multirank
@pytest.mark.slow
def test_weights_of_every_layout_arrive_bit_for_bit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    reference.make_model("qwen2", model)
    expected = dict(read_tensors(model))
    architecture = read_architecture(model)
    jobs = []
    shared_weights = []
    try:
        for number, (tp, pp, dp) in enumerate(LAYOUTS):
            memory = memory_path()
            shared_weights.append(SharedWeights(memory, architecture, create=True))
            targets = {"shared": memory, "disk": tmp_path / f"disk{number}"}
            routes = {}
            for transport, target in targets.items():
                routes[str(tmp_path / f"{number}_{transport}.json")] = SyncRoute(
                    transport=transport,
                    target=str(target),
                    model=str(model),
                    half=number % 2,
                    checksums=True,
                )
            arguments = {
                "spec": ranks.make_spec(str(model), tp=tp, pp=pp, dp=dp),
                "routes": routes,
            }
            jobs.append(ranks.Job(function=ranks.export, arguments=arguments, tp=tp, pp=pp, dp=dp))
        ranks.run_jobs(jobs)
        for number, shared in enumerate(shared_weights):
            _check_updates(tmp_path, number, shared, expected)
    finally:
        for shared in shared_weights:
            shared.file.unlink()


def _check_updates(
    folder: Path, number: int, shared: SharedWeights, expected: Mapping[str, Tensor]
) -> None:
    """Assert that the weights of a layout have arrived in shared memory and on disk."""
    half = number % 2
    assert shared.versions[half] == 1
    received = dict(shared.halves[half].tensors())
    for name, tensor in received.items():
        assert torch.equal(tensor, expected[name]), (LAYOUTS[number], name)
    checksums = {name: checksum(tensor) for name, tensor in received.items()}
    update = json.loads((folder / f"{number}_shared.json").read_text())
    assert update["checksums"] == checksums

    update = json.loads((folder / f"{number}_disk.json").read_text())
    for name, tensor in read_tensors(Path(update["location"])):
        assert torch.equal(tensor, expected[name]), (LAYOUTS[number], name)
    assert update["checksums"] == {name: checksums[name] for name in update["checksums"]}


async def kill(engine: HostedEngine) -> None:
    """Kill the engine's actor."""
    os.kill(await engine.call("pid"), signal.SIGKILL)


@pytest.mark.slow
def test_an_engine_that_dies_goes_on_with_the_weights_it_had(
    running_ray: None, tmp_path: Path
) -> None:
    import ray

    reference.make_model("qwen2", tmp_path)
    weights = {name: tensor * 1.1 for name, tensor in read_tensors(tmp_path)}
    checksums = {name: checksum(tensor) for name, tensor in weights.items()}
    wrong_name = "model.layers.1.self_attn.o_proj.weight"
    wrong_weights = {name: tensor.clone() for name, tensor in weights.items()}
    wrong_weights[wrong_name].view(torch.int32)[2, 3] ^= 1  # one bit differs from the trainer's
    messages: list[str] = []
    settings = EmbeddedSettings(folder=tmp_path, max_length=64, rows=4, restarts=2)
    engine = HostedEngine(settings, tell=messages.append)
    sampling = Sampling(max_tokens=40, seed=3)

    def request() -> asyncio.Task[Completion]:
        return asyncio.create_task(engine.generate([1, 2, 3], sampling))

    async def die_with_open_requests() -> list[Completion]:
        """Kill the actor while it has one request and another is still queued here."""
        exchanges = engine.exchanges
        pid = await engine.call("pid")
        sent = request()
        while not engine.exchanges > exchanges:
            await asyncio.sleep(0)
        queued = request()
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        completions = await asyncio.gather(sent, queued)
        await engine.generate([4], dataclasses.replace(sampling, max_tokens=1))
        # The new actor has sampled both replies, and the single token.
        assert (await engine.stats())["decode_tokens"] == 2 * 40 + 1
        return list(completions)

    async def die_during_an_update() -> Completion:
        """Kill the actor between the beginning and the end of an update to version 5."""
        waiting = request()
        route = await engine.begin_update()
        await kill(engine)
        update = make_sender(route).send(weights.items(), 5, route.half)
        await engine.commit_update(update)
        return await waiting

    async def send_wrong_weights() -> None:
        route = await engine.begin_update()
        update = make_sender(route).send(wrong_weights.items(), 6, route.half)
        update = dataclasses.replace(update, checksums=checksums)
        with pytest.raises(EngineError, match=rf"tensor '{wrong_name}': the engine's bytes"):
            await engine.commit_update(update)

    async def play() -> list[Completion]:
        await engine.load_weights(weights.items(), 4)
        completions = [await request()]
        completions += await die_with_open_requests()
        assert [completion.versions[-1].version for completion in completions[:2]] == [4, 4]

        await engine.sleep()
        await engine.wake()
        completions.append(await die_during_an_update())
        after_update = await request()
        await send_wrong_weights()
        after_wrong_update = await request()
        for completion in (after_update, after_wrong_update):
            assert completion.versions[-1].version == 5
        completions += [after_update, after_wrong_update]

        await kill(engine)  # no restart is left
        with pytest.raises(EngineError, match="the engine's actor failed"):
            await request()
        return completions

    try:
        completions = asyncio.run(play())
        weights_file = engine.slots[0].file
    finally:
        engine.close()
    assert not weights_file.exists()
    # All replies are from the same weights, whatever happened.
    assert len({completion.token_ids for completion in completions}) == 1
    assert messages == [
        "the engine's actor died; started again with version 4, 1 starts left",
        "the engine's actor died; started again with version 4, 0 starts left",
    ]
    assert ray.is_initialized()


@pytest.mark.slow
def test_an_engine_with_weights_on_disk_survives_deaths_and_wrong_weights(
    running_ray: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    weights = dict(read_tensors(tmp_path / "model"))
    messages: list[str] = []
    settings = EmbeddedSettings(folder=tmp_path / "model", max_length=64, rows=4, transport="disk")
    engine = HostedEngine(settings, tell=messages.append)
    sampling = Sampling(max_tokens=20, seed=3)

    async def send(version: int, *, dies: bool = False, wrong_checksum: bool = False) -> None:
        """Change the weights and send them; the actor may die, or the bytes be wrong."""
        weights["model.norm.weight"][:2] += 3.0
        update = make_sender(await engine.begin_update()).send(weights.items(), version)
        if dies:
            await kill(engine)
        if wrong_checksum:
            checksums = dict(update.checksums) | {"model.norm.weight": "0" * 16}
            update = dataclasses.replace(update, checksums=checksums)
        await engine.commit_update(update)

    async def generate() -> Completion:
        return await engine.generate([1, 2, 3], sampling)

    async def play() -> list[Any]:
        await send(1)
        await send(2)
        before_death = await generate()
        await kill(engine)
        after_death = await generate()
        await send(3, dies=True)
        after_update = await generate()
        message = r"tensor 'model\.norm\.weight': the engine's bytes differ"
        with pytest.raises(EngineError, match=message):
            await send(4, wrong_checksum=True)
        after_wrong_update = await generate()
        assert after_wrong_update.versions == after_update.versions
        assert after_wrong_update.logprobs == pytest.approx(after_update.logprobs, abs=5e-5)
        return [before_death, after_death, after_update]

    try:
        before_death, after_death, after_update = asyncio.run(play())
    finally:
        engine.close()
    assert after_death.token_ids == before_death.token_ids
    assert after_death.logprobs == before_death.logprobs
    assert [
        completion.versions[-1].version for completion in (before_death, after_death, after_update)
    ] == [2, 2, 3]
    assert after_update.logprobs != after_death.logprobs
    assert len(messages) == 2
