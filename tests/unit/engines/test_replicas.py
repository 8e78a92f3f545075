"""Replicas of the embedded engine: choice of the replica, equal replies, and the death of one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.embedded.replicas import ReplicatedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.records.trajectory import Completion, Sampling
from tests.support.tiny import MAX_LENGTH, make_model

torch.set_num_threads(1)
PROMPTS = [[n, n + 1, n + 2] for n in range(6)]


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a tiny model."""
    state = make_model(seed).state_dict()
    return [(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"]


async def sample_all(engine: Any) -> list[tuple[int, ...]]:
    """Return the completions of all prompts, sampled at the same time."""
    completions: list[Completion] = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens=60, seed=seed))
            for seed, prompt in enumerate(PROMPTS)
        )
    )
    return [completion.token_ids for completion in completions]


@pytest.mark.slow
def test_samples_of_one_prompt_go_to_one_replica(tmp_path: Path, running_ray: None) -> None:
    make_model(0).save_pretrained(tmp_path / "model")
    engine = ReplicatedEngine(
        EmbeddedSettings(
            folder=tmp_path / "model", weights_folder=tmp_path / "weights", max_length=MAX_LENGTH
        ),
        [{}, {}],
    )

    async def run() -> None:
        calls = [
            asyncio.create_task(engine.generate(PROMPTS[n // 8], Sampling(max_tokens=9, seed=n)))
            for n in range(32)
        ]
        first, second = engine.replicas
        while len(first._open) + len(second._open) < 32:
            await asyncio.sleep(0)
        prompts = [
            sorted(tuple(call.request.prompt_ids) for call in replica._open.values())
            for replica in (first, second)
        ]
        assert prompts == [[(0, 1, 2)] * 8 + [(2, 3, 4)] * 8, [(1, 2, 3)] * 8 + [(3, 4, 5)] * 8]
        await asyncio.gather(*calls)

    asyncio.run(run())
    engine.close()


@pytest.mark.slow
def test_a_replica_that_dies_is_started_again_with_the_present_weights(
    tmp_path: Path, running_ray: None
) -> None:
    make_model(0).save_pretrained(tmp_path / "model")
    lines: list[str] = []
    engine = ReplicatedEngine(
        EmbeddedSettings(
            folder=tmp_path / "model",
            weights_folder=tmp_path / "weights",
            restarts=1,
            max_length=MAX_LENGTH,
            deterministic=True,
        ),
        [{}, {}],
        tell=lines.append,
    )
    core = EmbeddedEngine.from_folder(tmp_path / "model", max_length=MAX_LENGTH, deterministic=True)
    reference = LocalEngine(core)

    async def run() -> None:
        before = await sample_all(reference)
        assert await sample_all(engine) == before
        await reference.load_weights(weights(1), 7)
        await engine.load_weights(weights(1), 7)
        after = await sample_all(reference)
        assert after != before

        replica = engine.replicas[0]
        os.kill(await replica.call("pid"), signal.SIGKILL)
        assert await sample_all(engine) == after
        os.kill(await replica.call("pid"), signal.SIGKILL)
        with pytest.raises(EngineError, match="actor failed"):
            await sample_all(engine)

    asyncio.run(run())
    assert engine.starts == 3
    engine.close()
    assert not (tmp_path / "weights").exists()
    assert lines == ["the engine's actor died; started again with version 7, 0 starts left"]


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_the_engine_at_once(
    tmp_path: Path, running_ray: None
) -> None:
    with pytest.raises(EngineError, match="/nowhere: no model here"):
        ReplicatedEngine(
            EmbeddedSettings(folder="/nowhere", weights_folder=tmp_path / "w", max_length=8), [{}]
        )
    make_model(0).config.save_pretrained(tmp_path)
    engine = ReplicatedEngine(
        EmbeddedSettings(folder=tmp_path, weights_folder=tmp_path / "w", max_length=8), [{}, {}]
    )
    with pytest.raises(EngineError, match=r"no \*.safetensors file"):
        asyncio.run(engine.generate([1], Sampling(max_tokens=1)))
    engine.close()
