"""Weights of every layout reach the engine bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engines.architecture import Architecture
from rollout.engines.decoder import read_folder
from rollout.engines.hosted import HostedEngine
from rollout.engines.protocol import EngineError, Sampling
from rollout.transports import make_sender
from rollout.transports.handover import Route
from rollout.transports.memory import fresh_place
from rollout.transports.shared import SharedWeights
from tests.support import ranks, reference

LAYOUTS = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2) if tp * pp * dp < 8]


@pytest.mark.multirank
@pytest.mark.slow
def test_every_layout_hands_over_bit_for_bit(tmp_path: Path) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    want = dict(read_folder(tmp_path / "model"))
    shape = Architecture.read(tmp_path / "model")
    jobs, mapped = [], {}
    try:
        for number, (tp, pp, dp) in enumerate(LAYOUTS):
            place = fresh_place()
            mapped[tp, pp, dp] = SharedWeights(place, shape, create=True)
            common = {"model": str(tmp_path / "model")}
            routes = {}
            for version, (transport, at) in enumerate((("shared", place), ("disk", tmp_path / f"disk{number}")), 1):
                options = {"report": str(tmp_path / f"{number}_{transport}.json")}
                routes[version] = Route(
                    transport=transport, place=str(at), options=options, state={"half": number % 2}, **common
                )
            spec = ranks.spec_of(str(tmp_path / "model"), tp=tp, pp=pp, dp=dp)
            arguments = {"spec": spec, "routes": routes}
            jobs.append(ranks.Job(function=ranks.export, arguments=arguments, tp=tp, pp=pp, dp=dp))
        ranks.play(jobs)
        for number, shared in enumerate(mapped.values()):
            half = shared.halves[number % 2]
            said = json.loads((tmp_path / f"{number}_shared.json").read_text())
            assert shared.versions[number % 2] == 1
            assert said["checksums"] == half.checksums()
            for name, tensor in half.tensors():
                assert torch.equal(tensor, want[name]), (LAYOUTS[number], name)
            said = json.loads((tmp_path / f"{number}_disk.json").read_text())
            written = dict(read_folder(Path(said["place"])))
            for name in written:
                assert torch.equal(written[name], want[name]), (LAYOUTS[number], name)
            assert said["checksums"] == {name: half.checksums()[name] for name in said["checksums"]}
    finally:
        for shared in mapped.values():
            shared.file.unlink()


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    import ray

    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    if ours:
        ray.shutdown()


@pytest.mark.slow
def test_an_engine_that_dies_goes_on_with_the_weights_it_had(running_ray: None, tmp_path: Path) -> None:
    import ray

    reference.make_model("qwen2", tmp_path)
    weights = {name: tensor * 1.1 for name, tensor in read_folder(tmp_path)}
    told: list[str] = []
    engine = HostedEngine(tmp_path, max_length=64, rows=4, restarts=2, tell=told.append)
    sampling = Sampling(max_tokens=40, seed=3)

    async def die() -> None:
        pid = await engine._call("pid")
        os.kill(pid, signal.SIGKILL)

    async def play() -> dict[str, Any]:
        await engine.load_weights(weights.items(), 4)
        before = await engine.generate([1, 2, 3], sampling)
        await die()
        after = await engine.generate([1, 2, 3], sampling)
        waiting = asyncio.create_task(engine.generate([1, 2, 3], sampling))
        route = await engine.route()  # and now in the middle of an update
        await die()
        handover = make_sender(route).send(weights.items(), 5, route.state)
        await engine.load_weights_from(handover)
        renewed = await waiting
        late = await engine.generate([1, 2, 3], sampling)
        bad = SharedWeights(engine._file, Architecture.read(tmp_path)).halves[1 - (engine._half or 0)]
        route = await engine.route()
        handover = make_sender(route).send(weights.items(), 6, route.state)
        bad.layers[1].out[2, 3] += 1e-3  # one number, after the trainer has written it
        with pytest.raises(EngineError, match=r"tensor 'model.layers.1.self_attn.o_proj.weight': the engine's bytes"):
            await engine.load_weights_from(handover)
        same = await engine.generate([1, 2, 3], sampling)
        await die()
        with pytest.raises(EngineError, match="the engine's actor failed"):
            await engine.generate([1, 2, 3], sampling)
        return {"before": before, "after": after, "renewed": renewed, "late": late, "same": same}

    try:
        said = asyncio.run(play())
        place = engine._file
    finally:
        engine.close()
    assert not place.exists()
    assert len({completion.token_ids for completion in said.values()}) == 1  # the same weights, whatever happened
    assert [said[name].versions[-1].version for name in ("before", "after", "late", "same")] == [4, 4, 5, 5]
    assert told == [
        "the engine's actor died; started again with version 4, 1 starts left",
        "the engine's actor died; started again with version 4, 0 starts left",
    ]
    assert ray.is_initialized()
