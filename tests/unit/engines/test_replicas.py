"""The embedded engine in several actors: who leaves, who joins, and that what is sampled does not depend on it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines.embedded import replicas
from rollout.engines.embedded.batching import LocalEngine
from rollout.engines.embedded.replicas import ReplicatedEngine
from rollout.engines.registry import engine_class
from rollout.records.trajectory import Sampling
from tests.support.tiny import MAX_LENGTH, make_model

torch.set_num_threads(1)
PROMPTS = [[n, n + 1, n + 2] for n in range(6)]


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, tensor in make_model(seed).state_dict().items()
        if name != "lm_head.weight"
    ]


async def play(engine: Any, new: int = 60) -> list[tuple[int, ...]]:
    """What it says to all prompts at once."""
    asked = [
        engine.generate(prompt, Sampling(max_tokens=new, seed=n))
        for n, prompt in enumerate(PROMPTS)
    ]
    return [completion.token_ids for completion in await asyncio.gather(*asked)]


async def pids(engine: ReplicatedEngine) -> list[int]:
    return [await actor._call("pid") for actor in engine._actors]


@pytest.mark.slow
def test_actors_join_and_leave_and_the_tokens_stay_the_same(
    tmp_path: Path, running_ray: None
) -> None:
    make_model(0).save_pretrained(tmp_path / "model")
    told: list[str] = []
    free: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    engine = engine_class("embedded_replicas")(
        tmp_path / "model",
        places=[{"max_restarts": 0}, {"num_cpus": 0}],
        weights_folder=tmp_path / "weights",
        joining=1,
        berths=(lambda: free.pop() if free else None, given.append),
        restarts=1,
        tell=told.append,
        max_length=MAX_LENGTH,
        deterministic=True,
    )
    alone = LocalEngine(tmp_path / "model", max_length=MAX_LENGTH, deterministic=True)

    async def run() -> None:
        both = await pids(engine)
        assert len({*both}) == 2
        groups = [
            asyncio.create_task(engine.generate(PROMPTS[n // 8], Sampling(max_tokens=9, seed=n)))
            for n in range(32)
        ]
        while sum(len(actor._waiting) for actor in engine._actors) < 32:
            await asyncio.sleep(0)
        asked = [
            sorted(tuple(ask[1]) for ask, _, _ in actor._waiting.values())
            for actor in engine._actors
        ]
        assert asked == [[(0, 1, 2)] * 8 + [(2, 3, 4)] * 8, [(1, 2, 3)] * 8 + [(3, 4, 5)] * 8]
        await asyncio.gather(*groups)
        first = await play(alone)
        playing = asyncio.create_task(play(engine))
        while not any(actor._waiting for actor in engine._actors):
            await asyncio.sleep(0)
        assert sorted(len(actor._waiting) for actor in engine._actors) == [3, 3]
        os.kill(both[0], signal.SIGKILL)
        assert await playing == first
        assert len(engine._actors) == 1
        assert given == [{"max_restarts": 0}]

        free.extend([{}, {}, {}])
        await alone.load_weights(weights(1), 7)
        await engine.load_weights(weights(1), 7)
        assert (len(engine._actors), len(free)) == (3, 1)  # no more than two and one that joins
        second = await play(alone)
        assert second != first
        assert await play(engine) == second

        for pid in (await pids(engine))[:2]:
            os.kill(pid, signal.SIGKILL)
        assert await play(engine) == second
        [last] = await pids(engine)
        os.kill(last, signal.SIGKILL)
        assert (
            await play(engine) == second
        )  # started again, on the weights that were handed over last
        [last] = await pids(engine)
        os.kill(last, signal.SIGKILL)
        with pytest.raises(EngineError, match="actor failed"):
            await play(engine)

    asyncio.run(run())
    engine.close()
    assert not (tmp_path / "weights").exists()
    counts = [line.split(": ")[0] for line in told]
    assert counts[:3] == [
        "an actor of the engine left, there are 1",
        "an actor of the engine joined with version 7; there are 2",
        "an actor of the engine joined with version 7; there are 3",
    ]
    assert told[-1].endswith("started again with version 7, 0 starts left")


@pytest.mark.slow
def test_an_actor_that_dies_while_nobody_asks_it_leaves_all_the_same(
    tmp_path: Path, running_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or Ray would keep a place for it, which another engine may wait for."""
    monkeypatch.setattr(replicas, "_LOOK_S", 0.1)
    make_model(0).save_pretrained(tmp_path / "model")
    told: list[str] = []
    given: list[dict[str, Any]] = []
    engine = ReplicatedEngine(
        tmp_path / "model",
        places=[{"max_restarts": 0}, {"num_cpus": 0}],
        weights_folder=tmp_path / "weights",
        berths=(lambda: None, given.append),
        tell=told.append,
        max_length=MAX_LENGTH,
    )

    async def run() -> None:
        await engine.generate(PROMPTS[0], Sampling(max_tokens=1))
        os.kill((await pids(engine))[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len(engine._actors) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    asyncio.run(run())
    engine.close()
    assert given == [{"max_restarts": 0}]
    assert [line.split(": ")[0] for line in told] == ["an actor of the engine left, there are 1"]


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_the_engine_at_once(
    tmp_path: Path, running_ray: None
) -> None:
    with pytest.raises(EngineError, match="/nowhere: no model here"):
        ReplicatedEngine("/nowhere", places=[{}], weights_folder=tmp_path / "w", max_length=8)
    make_model(0).config.save_pretrained(tmp_path)
    engine = ReplicatedEngine(
        tmp_path, places=[{}, {}], weights_folder=tmp_path / "w", max_length=8
    )
    with pytest.raises(EngineError, match=r"no \*.safetensors file"):
        asyncio.run(engine.generate([1], Sampling(max_tokens=1)))
    engine.close()
