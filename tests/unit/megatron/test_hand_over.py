"""Weights of every layout reach the engine bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.architecture import read_architecture
from rollout.models.tensors import checksum, read_tensors
from rollout.records.trajectory import Sampling
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights
from rollout.sync.transport import SyncRoute, make_sender
from tests.support import ranks, reference

LAYOUTS = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2) if tp * pp * dp < 8]


@pytest.mark.multirank
@pytest.mark.slow
def test_every_layout_hands_over_bit_for_bit(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    want = dict(read_tensors(tmp_path / "model"))
    shape = read_architecture(tmp_path / "model")
    jobs, mapped = [], {}
    try:
        for number, (tp, pp, dp) in enumerate(LAYOUTS):
            place = memory_path()
            mapped[tp, pp, dp] = SharedWeights(place, shape, create=True)
            targets = {"shared": place, "disk": tmp_path / f"disk{number}"}
            routes = {
                str(tmp_path / f"{number}_{transport}.json"): SyncRoute(
                    transport=transport,
                    target=str(target),
                    model=str(tmp_path / "model"),
                    half=number % 2,
                    checksums=True,
                )
                for transport, target in targets.items()
            }
            spec = ranks.make_spec(str(tmp_path / "model"), tp=tp, pp=pp, dp=dp)
            arguments = {"spec": spec, "routes": routes}
            jobs.append(ranks.Job(function=ranks.export, arguments=arguments, tp=tp, pp=pp, dp=dp))
        ranks.run_jobs(jobs)
        for number, shared in enumerate(mapped.values()):
            half = shared.halves[number % 2]
            said = json.loads((tmp_path / f"{number}_shared.json").read_text())
            assert shared.versions[number % 2] == 1
            sums = {name: checksum(tensor) for name, tensor in half.tensors()}
            assert said["checksums"] == sums
            for name, tensor in half.tensors():
                assert torch.equal(tensor, want[name]), (LAYOUTS[number], name)
            said = json.loads((tmp_path / f"{number}_disk.json").read_text())
            written = dict(read_tensors(Path(said["location"])))
            for name in written:
                assert torch.equal(written[name], want[name]), (LAYOUTS[number], name)
            assert said["checksums"] == {name: sums[name] for name in said["checksums"]}
    finally:
        for shared in mapped.values():
            shared.file.unlink()


@pytest.mark.slow
def test_an_engine_that_dies_goes_on_with_the_weights_it_had(
    running_ray: None, tmp_path: Path
) -> None:
    import ray

    reference.make_model("qwen2", tmp_path)
    weights = {name: tensor * 1.1 for name, tensor in read_tensors(tmp_path)}
    told: list[str] = []
    engine = HostedEngine(
        EmbeddedSettings(folder=tmp_path, max_length=64, rows=4, restarts=2), tell=told.append
    )
    sampling = Sampling(max_tokens=40, seed=3)

    async def die() -> None:
        pid = await engine.call("pid")
        os.kill(pid, signal.SIGKILL)

    async def play() -> dict[str, Any]:
        await engine.load_weights(weights.items(), 4)
        before = await engine.generate([1, 2, 3], sampling)
        exchanges = engine.exchanges
        pid = await engine.call("pid")
        asked = [asyncio.create_task(engine.generate([1, 2, 3], sampling))]
        while not engine.exchanges > exchanges:  # until the actor has it
            await asyncio.sleep(0)
        asked.append(
            asyncio.create_task(engine.generate([1, 2, 3], sampling))
        )  # and this one is still here
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        after, queued = await asyncio.gather(*asked)
        await engine.generate([4], dataclasses.replace(sampling, max_tokens=1))
        assert (await engine.stats())[
            "decode_tokens"
        ] == 2 * 40 + 1  # both were asked again, and once
        await engine.sleep()  # nothing is left over
        await engine.wake()
        waiting = asyncio.create_task(engine.generate([1, 2, 3], sampling))
        route = await engine.begin_update()  # and now in the middle of an update
        await die()
        update = make_sender(route).send(weights.items(), 5, route.half)
        await engine.commit_update(update)
        renewed = await waiting
        late = await engine.generate([1, 2, 3], sampling)
        route = await engine.begin_update()
        spoilt = {name: tensor.clone() for name, tensor in weights.items()}
        spoilt["model.layers.1.self_attn.o_proj.weight"].view(torch.int32)[2, 3] ^= 1
        # one bit is not the trainer's
        update = make_sender(route).send(spoilt.items(), 6, route.half)
        right = {name: checksum(tensor) for name, tensor in weights.items()}
        update = dataclasses.replace(update, checksums=right)
        with pytest.raises(
            EngineError,
            match=r"tensor 'model.layers.1.self_attn.o_proj.weight': the engine's bytes",
        ):
            await engine.commit_update(update)
        same = await engine.generate([1, 2, 3], sampling)
        await die()
        with pytest.raises(EngineError, match="the engine's actor failed"):
            await engine.generate([1, 2, 3], sampling)
        return {
            "before": before,
            "after": after,
            "queued": queued,
            "renewed": renewed,
            "late": late,
            "same": same,
        }

    try:
        said = asyncio.run(play())
        place = engine.slots[0].file
    finally:
        engine.close()
    assert not place.exists()
    assert (
        len({completion.token_ids for completion in said.values()}) == 1
    )  # the same weights, whatever happened
    assert [said[name].versions[-1].version for name in ("before", "after", "late", "same")] == [
        4,
        4,
        5,
        5,
    ]
    assert told == [
        "the engine's actor died; started again with version 4, 1 starts left",
        "the engine's actor died; started again with version 4, 0 starts left",
    ]
    assert ray.is_initialized()


@pytest.mark.slow
def test_an_engine_that_takes_weights_from_a_folder_survives_deaths_and_wrong_weights(
    running_ray: None, tmp_path: Path
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    weights = dict(read_tensors(tmp_path / "model"))
    told: list[str] = []
    engine = HostedEngine(
        EmbeddedSettings(folder=tmp_path / "model", max_length=64, rows=4, transport="disk"),
        tell=told.append,
    )
    sampling = Sampling(max_tokens=20, seed=3)

    async def send(version: int, *, dies: bool = False, wrong: bool = False) -> None:
        weights["model.norm.weight"][:2] += 3.0
        update = make_sender(await engine.begin_update()).send(weights.items(), version)
        if dies:
            os.kill(await engine.call("pid"), signal.SIGKILL)
        if wrong:
            checksums = dict(update.checksums) | {"model.norm.weight": "0" * 16}
            update = dataclasses.replace(update, checksums=checksums)
        await engine.commit_update(update)

    async def play() -> list[Any]:
        await send(1)
        await send(2)
        before = await engine.generate([1, 2, 3], sampling)
        os.kill(await engine.call("pid"), signal.SIGKILL)
        after = await engine.generate([1, 2, 3], sampling)
        await send(3, dies=True)
        late = await engine.generate([1, 2, 3], sampling)
        with pytest.raises(
            EngineError, match=r"tensor 'model\.norm\.weight': the engine's bytes differ"
        ):
            await send(4, wrong=True)
        same = await engine.generate([1, 2, 3], sampling)
        assert same.versions == late.versions
        assert same.logprobs == pytest.approx(late.logprobs, abs=5e-5)
        return [before, after, late]

    try:
        before, after, late = asyncio.run(play())
    finally:
        engine.close()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert [completion.versions[-1].version for completion in (before, after, late)] == [2, 2, 3]
    assert late.logprobs != after.logprobs
    assert len(told) == 2
