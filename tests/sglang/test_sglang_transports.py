"""Weight transports into a real SGLang server, its restarts, and its error messages."""

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
    """The server's checksums of its tensors are equal, although the tensors were overwritten in between."""
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    client = engine.fleet.replicas[0].client

    async def checksums() -> dict[str, str]:
        answer: Any = await client.call("/weights_checker", {"action": "checksum"})
        (rank,) = answer["ranks"]
        by_tensor: dict[str, str] = rank["checksums"]
        return by_tensor

    async def run() -> list[dict[str, str]]:
        await engine.load_weights(weights(3), 20)  # read from a folder by SGLang's own code
        from_folder = await checksums()
        await client.call("/weights_checker", {"action": "reset_tensors"})
        overwritten = await checksums()
        engine.transport = transport
        await engine.load_weights(weights(3), 21)
        return [from_folder, overwritten, await checksums()]

    try:
        from_folder, overwritten, restored = asyncio.run(run())
    finally:
        engine.transport = "disk"
    assert restored == from_folder
    assert not {name for name in from_folder if overwritten[name] == from_folder[name]}


def test_an_error_has_the_servers_message(engine: SGLangEngine) -> None:
    call = engine.fleet.call_all("/update_weights_from_disk", {"model_path": "/nowhere"})
    with pytest.raises(EngineError, match="SGLang /update_weights_from_disk: status 400: "):
        asyncio.run(call)


def test_a_server_killed_during_a_broadcast_gets_all_weights_again(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (replica,) = engine.fleet.replicas
    if not replica.owned:
        pytest.skip("the server is not ours to end")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(push, "PUSHED_BUCKET_BYTES", 1)  # every tensor has its own broadcast
    monkeypatch.setattr(engine, "transport", "distributed")
    engine.fleet.tell = lambda _: None

    async def run() -> Any:
        pid = await pid_of(replica)
        assert pid is not None

        def weights_with_kill() -> Iterator[tuple[str, Tensor]]:
            for number, entry in enumerate(weights(13)):
                if number == 6:
                    os.killpg(pid, signal.SIGKILL)
                yield entry

        with pytest.raises(EngineError, match="SGLang"):
            await engine.load_weights(weights_with_kill(), 33)
        await engine.load_weights(weights(13), 33)
        return await engine.generate([1, 2, 3], Sampling(max_tokens=6))

    starts = engine.starts
    completion = asyncio.run(run())
    assert engine.starts == starts + 1
    assert [span.version for span in completion.versions] == [33]
    assert max_error(make_model(13), [1, 2, 3], completion) < LOGPROB_TOLERANCE


def test_a_killed_server_restarts_with_the_weights_of_the_update(engine: SGLangEngine) -> None:
    (replica,) = engine.fleet.replicas
    if not replica.owned:
        pytest.skip("the server is not ours to end")
    messages: list[str] = []
    engine.fleet.tell = messages.append
    prompt = prompts(1, seed=8)[0]

    async def run() -> Any:
        await engine.load_weights(weights(4), 31)
        route = await engine.begin_update()
        update = make_sender(route).send(weights(5), 32)
        pid = await pid_of(replica)
        assert pid is not None
        # The trainer has written the weights, and the server has not read them yet.
        os.killpg(pid, signal.SIGKILL)
        await engine.commit_update(update)
        return await engine.generate(prompt, Sampling(max_tokens=6))

    completion = asyncio.run(run())
    assert completion.versions[-1].version == 32
    assert max_error(make_model(5), prompt, completion) < LOGPROB_TOLERANCE
    (message,) = messages
    # One restart is left, unless another test has killed the server.
    assert re.search(r"starting it again, [01] restarts left$", message)
    assert "\n" not in message
