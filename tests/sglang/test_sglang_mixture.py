"""A mixture of experts on a real SGLang server: its log-probabilities, its routing, and updates by every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings
from rollout.records.trajectory import Sampling
from tests.contract.test_engines import LOGPROB_TOLERANCE, generate_all, max_error, prompts
from tests.support import reference
from tests.support.sglang_server import make_engine
from tests.unit.engines.test_routing import reference_experts

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@dataclass(frozen=True, slots=True)
class Mixture:
    """SGLang server, and a Qwen3-MoE of transformers with the same weights."""

    engine: SGLangEngine
    model: torch.nn.Module


@pytest.fixture(scope="module")
def mixture(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    folder = tmp_path_factory.mktemp("mixture")
    model = reference.make_model("qwen3_moe", folder / "model", mlp_only_layers=[])
    engine = make_engine(sglang, folder / "model", folder, restarts=0)
    yield Mixture(engine, model)
    engine.close()


def rotate_experts(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Give each expert of the model the weights of the expert before it; return all weights as on disk."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter.roll(1, 0))
    return list(reference.tensors(model).items())


def test_its_logprobs_are_those_of_hugging_face(mixture: Mixture) -> None:
    requests = [(prompt, Sampling(max_tokens=12)) for prompt in prompts(8, seed=30)]
    completions = generate_all(mixture.engine, requests)
    for (prompt, _), completion in zip(requests, completions, strict=True):
        assert max_error(mixture.model, prompt, completion) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_new_experts_are_used(mixture: Mixture, transport: str, shared_by_name: None) -> None:
    if transport == "distributed" and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (prompt,) = prompts(1, seed=31, low=30)
    requests = [(prompt, Sampling(max_tokens=8))]
    version = 60 + ["disk", "tensor", "distributed"].index(transport)
    (before,) = generate_all(mixture.engine, requests)
    mixture.engine.transport = transport
    asyncio.run(mixture.engine.load_weights(rotate_experts(mixture.model), version))
    (after,) = generate_all(mixture.engine, requests)
    assert after.versions[0].version == version
    assert max_error(mixture.model, prompt, after) < LOGPROB_TOLERANCE
    # The old experts give other log-probabilities.
    assert max_error(mixture.model, prompt, before) > 100 * LOGPROB_TOLERANCE


def test_sglang_reports_the_experts_that_hugging_face_chooses(sglang: str, tmp_path: Path) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    model = reference.make_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[])
    engine = make_engine(sglang, tmp_path / "model", tmp_path, restarts=0, routing=True)
    try:
        requests = [(prompt, Sampling(max_tokens=12)) for prompt in prompts(4, seed=32)]
        completions = generate_all(engine, requests)
        for (prompt, _), completion in zip(requests, completions, strict=True):
            expected = reference_experts(model, [*prompt, *completion.token_ids], k=2)
            experts = np.frombuffer(completion.routing, "u1").reshape(expected.shape)
            assert (np.sort(experts) == expected).all()
    finally:
        engine.close()


def test_dense_layers_among_sparse_layers_are_refused(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path)
    with pytest.raises(
        EngineError, match=r"mlp_only_layers \[1\] .* SGLang takes every layer of a qwen3_moe"
    ):
        SGLangEngine(SGLangSettings(folder=tmp_path, max_length=64, python="/nowhere"))
