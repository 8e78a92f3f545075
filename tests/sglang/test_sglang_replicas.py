"""Two real servers of one policy: where requests go, who gets new weights, and what follows a death for good."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings
from rollout.records.trajectory import Completion, Sampling
from rollout.sync.transport import WeightUpdate
from tests.contract.test_engines import LOGPROB_TOLERANCE, generate_all, max_error, prompts
from tests.support import reference
from tests.support.sglang_server import make_engine, pid_of

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

SESSIONS = [f"task/{number}" for number in range(8)]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers, an engine that started them, and one that was told of them."""

    owner: SGLangEngine
    guest: SGLangEngine
    model: torch.nn.Module  # a Qwen3 with a head of its own


@pytest.fixture(scope="module")
def pair(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if "://" in sglang:
        pytest.skip("the servers are to be started here")
    folder = tmp_path_factory.mktemp("replicas")
    model = reference.make_model("qwen3", folder / "model")
    owner = make_engine(sglang, folder / "model", folder, replicas=2, restarts=0)
    try:
        generate_all(
            owner, [([1], Sampling(max_tokens=1, session=session)) for session in SESSIONS]
        )
        urls = [replica.client.url for replica in owner.fleet.replicas]
        there = {"urls": urls, "key": owner.settings.server_key}
        guest = SGLangEngine(
            SGLangSettings(
                folder=folder / "model", max_length=160, weights_folder=folder / "guest", **there
            )
        )
        yield Pair(owner, guest, model)
    finally:
        owner.close()


def scaled(model: torch.nn.Module, factor: float) -> list[tuple[str, Tensor]]:
    """The model's weights, its norms' multiplied by `factor`; the model is changed alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(factor)
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def turns(engine: SGLangEngine, told: Sequence[list[int]]) -> list[Completion]:
    """A turn of every session."""
    pairs = zip(SESSIONS, told, strict=True)
    return generate_all(
        engine, [(prompt, Sampling(max_tokens=4, session=session)) for session, prompt in pairs]
    )


def test_a_session_finds_its_prefix_on_its_replica(pair: Pair) -> None:
    told = [prompt[:40] for prompt in prompts(8, seed=20, low=41)]
    first = turns(pair.owner, told)
    told = [[*prompt, *said.token_ids, 5] for prompt, said in zip(told, first, strict=True)]
    second = turns(pair.owner, told)
    assert [said.cached_tokens for said in second] == [
        43
    ] * 8  # all but the last token sampled, which never ran
    asyncio.run(pair.owner.fleet.replicas[0].client.call("/flush_cache", {}))
    told = [[*prompt, *said.token_ids, 5] for prompt, said in zip(told, second, strict=True)]
    third = turns(pair.guest, told)  # by the same servers in the same order, the same places
    cached = [said.cached_tokens for said in third]
    assert set(cached) == {0, 48}
    for prompt, said in zip(told, third, strict=True):
        assert max_error(pair.model, prompt, said) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_new_weights_reach_every_replica(pair: Pair, transport: str) -> None:
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told = prompts(8, seed=21, low=30)
    turns(pair.owner, told)
    version = 30 + ["disk", "distributed"].index(transport)
    pair.owner.transport = transport
    asyncio.run(pair.owner.load_weights(scaled(pair.model, 1.1), version))
    pair.owner.transport = "disk"
    for prompt, said in zip(told, turns(pair.owner, told), strict=True):
        assert said.cached_tokens == 0
        assert [span.version for span in said.versions] == [version]
        assert max_error(pair.model, prompt, said) < LOGPROB_TOLERANCE


def test_replicas_with_different_weights_are_told(pair: Pair) -> None:
    async def play() -> None:
        await pair.owner.fleet.replicas[1].client.call(
            "/weights_checker", {"action": "reset_tensors"}
        )
        update = WeightUpdate(version=0, transport="tensor", location="", checksums={}, bytes=0)
        await pair.owner.commit_update(update)

    with pytest.raises(EngineError, match="is not the same in the servers at http"):
        asyncio.run(play())
    asyncio.run(pair.owner.load_weights(scaled(pair.model, 1.0), 39))


def test_one_rank_cannot_share_memory_with_two_servers(pair: Pair, shared_by_name: None) -> None:
    pair.owner.transport = "tensor"
    with pytest.raises(
        EngineError,
        match="needs a trainer rank on every GPU of the engine: 2 servers of 1 GPUs, 1 r",
    ):
        asyncio.run(pair.owner.load_weights(scaled(pair.model, 1.0), 40))
    pair.owner.transport = "disk"
    asyncio.run(pair.owner.load_weights(scaled(pair.model, 1.1), 41))
    (said,) = generate_all(pair.owner, [([1, 2, 3], Sampling(max_tokens=4))])
    assert said.versions[0].version == 41
    assert max_error(pair.model, [1, 2, 3], said) < LOGPROB_TOLERANCE


def test_an_engine_that_was_told_of_servers_updates_them(pair: Pair) -> None:
    asyncio.run(pair.guest.load_weights(scaled(pair.model, 1.1), 50))
    for engine in (pair.guest, pair.owner):
        (said,) = generate_all(engine, [([4, 5, 6], Sampling(max_tokens=4))])
        assert said.versions[0].version == 50
        assert max_error(pair.model, [4, 5, 6], said) < LOGPROB_TOLERANCE
    pair.guest.close()
    assert generate_all(
        pair.owner, [([4, 5, 6], Sampling(max_tokens=4))]
    )  # what is not its own it leaves running


def test_a_death_without_a_restart_is_told_and_the_other_replica_goes_on(pair: Pair) -> None:
    async def play() -> list[Completion | BaseException]:
        pid = await pid_of(pair.owner.fleet.replicas[0])
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        waiting = (
            pair.owner.generate([8, 9], Sampling(max_tokens=4, session=session))
            for session in SESSIONS
        )
        return await asyncio.gather(*waiting, return_exceptions=True)

    said = asyncio.run(play())
    errors = [one for one in said if isinstance(one, BaseException)]
    assert 0 < len(errors) < len(SESSIONS)
    for error in errors:
        assert isinstance(error, EngineError)
        assert "server.0.log says last: " in str(error)
        assert str(error).endswith("no restart is left")
    for one in said:
        if isinstance(one, Completion):
            assert max_error(pair.model, [8, 9], one) < LOGPROB_TOLERANCE
    with pytest.raises(EngineError, match="is gone, and it is not ours to start"):
        asyncio.run(pair.guest.fleet.call_all("/flush_cache", {}))
