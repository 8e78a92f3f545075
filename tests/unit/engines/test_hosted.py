"""Embedded engine in an actor: an actor that does not answer is started again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.records.trajectory import Sampling
from tests.support.tiny import MAX_LENGTH, make_model


@pytest.mark.slow
def test_a_stopped_actor_is_started_again_and_gives_the_same_reply(
    tmp_path: Path, running_ray: None
) -> None:
    make_model(0).save_pretrained(tmp_path / "model")
    messages: list[str] = []
    engine = HostedEngine(
        EmbeddedSettings(folder=tmp_path / "model", max_length=MAX_LENGTH, restarts=1, hang_s=20.0),
        tell=messages.append,
    )
    sampling = Sampling(max_tokens=30, seed=3)

    async def play() -> tuple[object, object]:
        first = await engine.generate([1, 2, 3], sampling)
        os.kill(await engine.call("pid"), signal.SIGSTOP)
        return first, await engine.generate([1, 2, 3], sampling)

    try:
        first, second = asyncio.run(play())
    finally:
        engine.close()
    assert first == second
    assert messages == [
        "the engine's actor has not answered for 20 s",
        "the engine's actor died; started again with version 0, 0 starts left",
    ]
