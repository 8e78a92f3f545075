"""Shards that two trainer ranks share with the two ranks of a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.sglang.engine import SGLangEngine
from rollout.records.trajectory import Sampling
from rollout.sync import SyncRoute, WeightUpdate
from rollout.sync.push import TensorSender
from rollout.sync.sglang_layout import SGLangLayout
from tests.contract.test_engines import LOGPROB_TOLERANCE, ask, prompts, weights, worst
from tests.support.meeting import meeting
from tests.support.sglang_server import make_engine
from tests.support.tiny import make_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(scope="module")
def engine(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    if "://" in sglang or 1 <= torch.cuda.device_count() < 2:
        pytest.skip("the server is to be started here, on two GPUs or none")
    folder = tmp_path_factory.mktemp("shards")
    make_model(0).save_pretrained(folder / "model")
    started = make_engine(sglang, folder / "model", folder, tp=2, transport="tensor", restarts=0)
    yield started
    started.close()


def send(route: SyncRoute, version: int, *, cut: bool) -> tuple[list[WeightUpdate], frozenset[str]]:
    """As two ranks of a trainer that is cut as the server is, or whose ranks have all of each tensor."""
    alone, full = TensorSender(route).shares(2), weights(version)

    def play(rank: int, exchange: Callable[[Any], list[Any]]) -> WeightUpdate:
        layout = SGLangLayout(**route.options["held"], ranks=[rank])

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in full:
                yield name, layout.shares(name, tensor)[0] if cut and name in alone else tensor

        return TensorSender(route, rank=rank, exchange=exchange).send(
            stream(), version, route.state
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(play, range(2), meeting(2))), alone


@pytest.mark.parametrize(("version", "cut"), [(11, True), (12, False)])
def test_each_rank_of_a_server_takes_its_shards(
    engine: SGLangEngine, version: int, cut: bool, shared_by_name: None
) -> None:
    prompt, sampling = prompts(1, seed=7, low=60)[0], Sampling(max_tokens=5)
    ask(engine, [(prompt, sampling)])
    route = asyncio.run(engine.begin_update())
    (first, second), alone = send(route, version, cut=cut)
    assert (
        "model.layers.0.self_attn.o_proj.weight" in alone
        and "model.embed_tokens.weight" not in alone
    )
    # without a GPU the server makes the layers wider than a share of theirs: those it is given whole
    assert torch.cuda.is_available() or "model.layers.0.mlp.down_proj.weight" not in alone
    assert first.checksums == second.checksums
    assert {name.partition(" of rank ")[2] for name in first.checksums} == {"0", "1"}
    asyncio.run(engine.commit_update(first))  # compares what both ranks of the server hold
    (completion,) = ask(engine, [(prompt, sampling)])
    assert completion.cached_tokens == 0
    assert [(span.version, span.start, span.end) for span in completion.versions] == [
        (version, 0, 5)
    ]
    assert worst(make_model(version), prompt, completion) < LOGPROB_TOLERANCE


def test_a_rank_that_holds_another_shard_is_named(
    engine: SGLangEngine, shared_by_name: None
) -> None:
    route = asyncio.run(engine.begin_update())
    (update, _), _ = send(route, 13, cut=True)
    name = "model.layers.1.self_attn.qkv_proj.weight of rank {}"
    swapped = {
        name.format(0): update.checksums[name.format(1)],
        name.format(1): update.checksums[name.format(0)],
    }
    with pytest.raises(
        EngineError, match=r"tensor 'model.layers.1.self_attn.qkv_proj.weight of rank 0' and 1 more"
    ):
        asyncio.run(
            engine.commit_update(replace(update, checksums={**update.checksums, **swapped}))
        )
