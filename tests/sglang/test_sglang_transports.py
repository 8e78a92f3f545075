"""Every transport into a real SGLang server, its death, and what it says when it refuses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.sglang.engine import SGLangEngine
from rollout.records.trajectory import Sampling
from rollout.sync import push
from rollout.sync.transport import make_sender
from tests.contract.test_engines import (
    LOGPROB_TOLERANCE,
    generate_all,
    max_error,
    prompts,
    weights,
)
from tests.support.sglang_server import pid_of
from tests.support.tiny import make_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture
def engine(sglang_engine: SGLangEngine) -> SGLangEngine:
    return sglang_engine


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_a_transport_brings_new_weights_to_a_cached_prompt(
    engine: SGLangEngine, transport: str, shared_by_name: None
) -> None:
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine.transport = transport
    prompt = prompts(1, seed=7, low=60)[0]
    sampling = Sampling(max_tokens=5)
    for version in (11, 12):
        generate_all(engine, [(prompt, sampling)])
        asyncio.run(engine.load_weights(iter(weights(version)), version))
        (completion,) = generate_all(engine, [(prompt, sampling)])
        assert completion.cached_tokens == 0
        assert [(span.version, span.start, span.end) for span in completion.versions] == [
            (version, 0, 5)
        ]
        assert max_error(make_model(version), prompt, completion) < LOGPROB_TOLERANCE
    engine.transport = "disk"


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_transport_restores_every_byte_that_a_server_reads_from_a_folder(
    engine: SGLangEngine, transport: str, shared_by_name: None
) -> None:
    """The server's own checksums of all its tensors are equal, though they were overwritten between."""
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    client = engine.fleet.replicas[0].client

    async def checksums() -> dict[str, str]:
        answer: Any = await client.call("/weights_checker", {"action": "checksum"})
        (rank,) = answer["ranks"]
        found: dict[str, str] = rank["checksums"]
        return found

    async def play() -> list[dict[str, str]]:
        await engine.load_weights(weights(3), 20)  # by the server's own reader of folders
        read = await checksums()
        await client.call("/weights_checker", {"action": "reset_tensors"})
        overwritten = await checksums()
        engine.transport = transport
        await engine.load_weights(weights(3), 21)
        return [read, overwritten, await checksums()]

    try:
        read, overwritten, restored = asyncio.run(play())
    finally:
        engine.transport = "disk"
    assert restored == read
    assert not {name for name in read if overwritten[name] == read[name]}


def test_a_refusal_is_in_the_servers_words(engine: SGLangEngine) -> None:
    async def play() -> None:
        await engine.fleet.call_all("/update_weights_from_disk", {"model_path": "/nowhere"})

    with pytest.raises(EngineError, match="SGLang /update_weights_from_disk: status 400: "):
        asyncio.run(play())


def test_a_server_that_dies_amid_a_broadcast_gets_all_of_it_again(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (replica,) = engine.fleet.replicas
    if not replica.owned:
        pytest.skip("the server is not ours to end")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(push, "PUSHED_BUCKET_BYTES", 1)  # a broadcast for every tensor
    monkeypatch.setattr(engine, "transport", "distributed")
    engine.fleet.tell = lambda _: None

    async def play() -> Any:
        pid = await pid_of(replica)
        assert pid is not None

        def fatal() -> Iterator[tuple[str, Tensor]]:
            for number, entry in enumerate(weights(13)):
                if number == 6:
                    os.killpg(pid, signal.SIGKILL)
                yield entry

        with pytest.raises(EngineError, match="SGLang"):
            await engine.load_weights(fatal(), 33)
        await engine.load_weights(weights(13), 33)
        return await engine.generate([1, 2, 3], Sampling(max_tokens=6))

    starts = engine.starts
    completion = asyncio.run(play())
    assert engine.starts == starts + 1
    assert [span.version for span in completion.versions] == [33]
    assert max_error(make_model(13), [1, 2, 3], completion) < LOGPROB_TOLERANCE


def test_a_server_that_dies_comes_back_with_its_weights(engine: SGLangEngine) -> None:
    (replica,) = engine.fleet.replicas
    if not replica.owned:
        pytest.skip("the server is not ours to end")
    told: list[str] = []
    engine.fleet.tell = told.append
    prompt = prompts(1, seed=8)[0]

    async def play() -> Any:
        await engine.load_weights(weights(4), 31)
        route = await engine.begin_update()
        update = make_sender(route).send(weights(5), 32)
        pid = await pid_of(replica)
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)  # between the trainer's writing and the server's reading
        await engine.commit_update(update)
        return await engine.generate(prompt, Sampling(max_tokens=6))

    completion = asyncio.run(play())
    assert completion.versions[-1].version == 32
    assert max_error(make_model(5), prompt, completion) < LOGPROB_TOLERANCE
    assert len(told) == 1
    assert re.search(
        r"started again, [01] restarts left$", told[0]
    )  # one, where no other test ended the server
    assert "\n" not in told[0]
