"""Two real SGLang servers of one policy: routing of sessions, weight updates, and the death of a server."""

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
    """Two servers with two engines.

    Attributes:
        owner: engine that started the servers.
        guest: engine that only knows their URLs.
        model: Qwen3 of transformers with the servers' weights.
    """

    owner: SGLangEngine
    guest: SGLangEngine
    model: torch.nn.Module


@pytest.fixture(scope="module")
def pair(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if "://" in sglang:
        pytest.skip("the servers are to be started here")
    folder = tmp_path_factory.mktemp("replicas")
    model = reference.make_model("qwen3", folder / "model")
    owner = make_engine(sglang, folder / "model", folder, replicas=2, restarts=0)
    try:
        # The first requests start the servers.
        requests = [([1], Sampling(max_tokens=1, session=session)) for session in SESSIONS]
        generate_all(owner, requests)
        settings = SGLangSettings(
            folder=folder / "model",
            max_length=160,
            weights_folder=folder / "guest",
            urls=[replica.client.url for replica in owner.fleet.replicas],
            key=owner.settings.server_key,
        )
        yield Pair(owner, SGLangEngine(settings), model)
    finally:
        owner.close()


def scale_norms(model: torch.nn.Module, factor: float) -> list[tuple[str, Tensor]]:
    """Multiply the weights of the model's norms by a factor; return all weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(factor)
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def generate_turns(
    engine: SGLangEngine, prompts_by_session: Sequence[list[int]]
) -> list[Completion]:
    """Sample one turn of every session."""
    requests = [
        (prompt, Sampling(max_tokens=4, session=session))
        for session, prompt in zip(SESSIONS, prompts_by_session, strict=True)
    ]
    return generate_all(engine, requests)


def next_turns(
    turn_prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> list[list[int]]:
    """Return the prompts of the next turns: prompt, reply and one further token."""
    return [
        [*prompt, *completion.token_ids, 5]
        for prompt, completion in zip(turn_prompts, completions, strict=True)
    ]


def test_a_session_finds_its_prefix_on_its_replica(pair: Pair) -> None:
    first_prompts = [prompt[:40] for prompt in prompts(8, seed=20, low=41)]
    first = generate_turns(pair.owner, first_prompts)
    second_prompts = next_turns(first_prompts, first)
    second = generate_turns(pair.owner, second_prompts)
    # Of 44 tokens, the last sampled one has no keys.
    assert [completion.cached_tokens for completion in second] == [43] * 8

    # Another engine with the same servers in the same order sends each session to the same replica.
    asyncio.run(pair.owner.fleet.replicas[0].client.call("/flush_cache", {}))
    third_prompts = next_turns(second_prompts, second)
    third = generate_turns(pair.guest, third_prompts)
    assert {completion.cached_tokens for completion in third} == {0, 48}
    for prompt, completion in zip(third_prompts, third, strict=True):
        assert max_error(pair.model, prompt, completion) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_new_weights_reach_every_replica(pair: Pair, transport: str) -> None:
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    turn_prompts = prompts(8, seed=21, low=30)
    generate_turns(pair.owner, turn_prompts)
    version = 30 + ["disk", "distributed"].index(transport)
    pair.owner.transport = transport
    asyncio.run(pair.owner.load_weights(scale_norms(pair.model, 1.1), version))
    pair.owner.transport = "disk"
    completions = generate_turns(pair.owner, turn_prompts)
    for prompt, completion in zip(turn_prompts, completions, strict=True):
        assert completion.cached_tokens == 0
        assert [span.version for span in completion.versions] == [version]
        assert max_error(pair.model, prompt, completion) < LOGPROB_TOLERANCE


def test_different_weights_of_replicas_are_reported(pair: Pair) -> None:
    async def reset_one_replica() -> None:
        client = pair.owner.fleet.replicas[1].client
        await client.call("/weights_checker", {"action": "reset_tensors"})
        update = WeightUpdate(version=0, transport="tensor", location="", checksums={}, bytes=0)
        await pair.owner.commit_update(update)

    with pytest.raises(EngineError, match="is not the same in the servers at http"):
        asyncio.run(reset_one_replica())
    asyncio.run(pair.owner.load_weights(scale_norms(pair.model, 1.0), 39))


def test_one_rank_cannot_share_memory_with_two_servers(pair: Pair, shared_by_name: None) -> None:
    pair.owner.transport = "tensor"
    message = "needs a trainer rank on every GPU of the engine: 2 servers of 1 GPUs, 1 r"
    with pytest.raises(EngineError, match=message):
        asyncio.run(pair.owner.load_weights(scale_norms(pair.model, 1.0), 40))
    pair.owner.transport = "disk"
    asyncio.run(pair.owner.load_weights(scale_norms(pair.model, 1.1), 41))
    (completion,) = generate_all(pair.owner, [([1, 2, 3], Sampling(max_tokens=4))])
    assert completion.versions[0].version == 41
    assert max_error(pair.model, [1, 2, 3], completion) < LOGPROB_TOLERANCE


def test_an_engine_updates_servers_that_it_did_not_start(pair: Pair) -> None:
    asyncio.run(pair.guest.load_weights(scale_norms(pair.model, 1.1), 50))
    for engine in (pair.guest, pair.owner):
        (completion,) = generate_all(engine, [([4, 5, 6], Sampling(max_tokens=4))])
        assert completion.versions[0].version == 50
        assert max_error(pair.model, [4, 5, 6], completion) < LOGPROB_TOLERANCE
    # Closing it does not end the servers.
    pair.guest.close()
    assert generate_all(pair.owner, [([4, 5, 6], Sampling(max_tokens=4))])


def test_a_dead_replica_without_restarts_fails_only_its_requests(pair: Pair) -> None:
    async def kill_one_and_generate() -> list[Completion | BaseException]:
        pid = await pid_of(pair.owner.fleet.replicas[0])
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        calls = [
            pair.owner.generate([8, 9], Sampling(max_tokens=4, session=session))
            for session in SESSIONS
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(kill_one_and_generate())
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert 0 < len(errors) < len(SESSIONS)
    for error in errors:
        assert isinstance(error, EngineError)
        assert "server.0.log says last: " in str(error)
        assert str(error).endswith("no restart is left")
    for outcome in outcomes:
        if isinstance(outcome, Completion):
            assert max_error(pair.model, [8, 9], outcome) < LOGPROB_TOLERANCE
    with pytest.raises(EngineError, match="is gone, and it was not started by this run"):
        asyncio.run(pair.guest.fleet.call_all("/flush_cache", {}))
