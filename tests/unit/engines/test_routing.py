"""Experts of each token in the completions of engines, for the router replay of trainers."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout.base.errors import EngineError
from rollout.engines import TokenCallback
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.sglang.client import SGLangClient, StreamedReply, parse_routing
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.server import server_arguments
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.architecture import Experts
from rollout.records.trajectory import Completion, Sampling, VersionSpan
from tests.support import reference
from tests.support.embedded import SIZES, drain

torch.set_num_threads(1)
FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"


def mixture(folder: Path, experts: int) -> Any:
    """Save a random model of four layers, of which the second is dense, and return it."""
    torch.manual_seed(3)
    sizes = SIZES | {"num_hidden_layers": 4, "num_experts": experts, "num_experts_per_tok": 3}
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=8, head_dim=16, mlp_only_layers=[1])
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_experts(model: Any, ids: list[int], k: int = 3) -> np.ndarray:
    """Return the experts [tokens, sparse layers, k] of all tokens but the last, by transformers."""
    router_logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    experts = [logits.topk(k).indices.sort().values for logits in router_logits]
    return torch.stack(experts, 1)[:-1].numpy()


@pytest.mark.parametrize(("experts", "dtype"), [(6, "u1"), (300, "<u2")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_completions_have_the_experts_that_transformers_chooses(
    tmp_path: Path, experts: int, dtype: str, deterministic: bool
) -> None:
    model = mixture(tmp_path, experts)
    engine = EmbeddedEngine.from_folder(
        tmp_path, max_length=128, rows=6, routing=True, deterministic=deterministic
    )

    def check(prompts: dict[int, list[int]]) -> dict[int, Completion]:
        for number, prompt in prompts.items():
            engine.submit(number, prompt, Sampling(max_tokens=7 + number, seed=number))
        completions: dict[int, Completion] = drain(engine)
        for number, prompt in prompts.items():
            ids = prompt + list(completions[number].token_ids)
            experts = np.frombuffer(completions[number].routing, dtype).reshape(len(ids) - 1, 3, 3)
            assert (np.sort(experts) == reference_experts(model, ids)).all()
        return completions

    prompt = np.random.default_rng(0).integers(0, 64, 40).tolist()
    # Equal prompts, one that shares 30 tokens with them, and one that shares none.
    first = check({0: prompt, 1: prompt, 2: [*prompt[:30], 1, 2, 3], 3: prompt[::-1]})
    reused = engine.stats.cached_tokens
    assert reused >= 40
    # Next turns of a chat, some of them in other rows than the first turn.
    longer = prompt + list(first[0].token_ids)
    check({4: [*longer, 5, 6], 5: [*longer, 7], 6: [*prompt[:35], 9], 7: [*prompt[::-1], 4]})
    assert engine.stats.cached_tokens > reused + 40


def test_without_the_setting_completions_have_no_experts(tmp_path: Path) -> None:
    mixture(tmp_path, 6)
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=64)
    engine.submit(0, [1, 2], Sampling(max_tokens=3))
    assert drain(engine)[0].routing == b""


def test_a_truncated_completion_has_the_experts_and_versions_of_its_tokens() -> None:
    spans = (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=5))
    whole = Completion(
        token_ids=(4, 5, 6, 7, 8),
        logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0),
        finish_reason="length",
        versions=spans,
        cached_tokens=1,
        routing=bytes(range(14)),  # two for each of 3 tokens of the prompt and 4 of the reply
    )
    assert whole.stopped_after(2, prompt_length=3) == Completion(
        token_ids=(4, 5),
        logprobs=(-1.0, -2.0),
        finish_reason="stop",
        versions=spans[:1],
        cached_tokens=1,
        routing=bytes(range(8)),
    )
    assert whole.stopped_after(3, prompt_length=3).versions == (
        spans[0],
        VersionSpan(version=4, start=2, end=3),
    )
    assert whole.stopped_after(5, prompt_length=3) == replace(whole, finish_reason="stop")


# Experts of Qwen3-30B-A3B.
EXPERTS = Experts(count=128, per_token=8, ffn=1, normalised=True, sparse=(True,) * 48)


def sglang_reply(numbers: np.ndarray, tokens: int) -> dict[str, Any]:
    """Return a reply of SGLang 0.5.23 with experts: int32 in base64, without a shape."""
    meta = {
        "routed_experts": b64encode(numbers.astype("<i4").tobytes()).decode(),
        "finish_reason": {"type": "stop"},
    }
    return {"output_ids": [7] * tokens, "meta_info": meta}


def test_the_experts_in_a_reply_of_sglang_are_validated() -> None:
    # For each of 7 tokens and 48 layers, 8 different ones of 128 experts.
    all_experts = np.tile(np.arange(128), (5 + 3 - 1, 48, 1))
    numbers = np.random.default_rng(0).permuted(all_experts, axis=2)[..., :8]
    assert parse_routing(sglang_reply(numbers, 3), 5, EXPERTS) == numbers.astype("u1").tobytes()
    many = Experts(count=512, per_token=8, ffn=1, normalised=True, sparse=(True,) * 48)
    assert (
        parse_routing(sglang_reply(numbers + 300, 3), 5, many)
        == (numbers + 300).astype("<u2").tobytes()
    )
    with pytest.raises(
        EngineError,
        match=r"SGLang gave 2688 routed experts between 0 and 127; expected 8 x 48 x 8 belo",
    ):
        parse_routing(sglang_reply(numbers, 4), 5, EXPERTS)
    with pytest.raises(EngineError, match=r"between 0 and 128; expected 7 x 48 x 8 below 128"):
        parse_routing(sglang_reply(numbers + 1, 3), 5, EXPERTS)
    with pytest.raises(
        EngineError,
        match=r"no routed experts, which engine.router_replay needs; .* --enable-return-r",
    ):
        parse_routing({"output_ids": [7], "meta_info": {}}, 5, EXPERTS)
    # A kernel that routes internally returns 0 for all experts.
    message = r"one expert twice: .* set engine.options: \{moe-runner-backend: triton\}"
    with pytest.raises(EngineError, match=message):
        parse_routing(sglang_reply(0 * numbers, 3), 5, EXPERTS)


def test_the_experts_of_a_long_reply_fit_into_an_answer() -> None:
    """Check the size of int32 in base64 for 131,072 tokens of Qwen3-235B-A22B: 94 layers of 8."""
    client = SGLangClient("http://127.0.0.1:9", timeout_s=1, connections=1)
    assert client._http.max_reply_bytes > 131_072 * 94 * 8 * 4 * 4 / 3


def test_the_last_event_of_a_stream_has_the_experts() -> None:
    numbers = np.arange(3 * 48 * 8).reshape(3, 48, 8) % 128
    last = sglang_reply(numbers, 2)
    events = [
        {"output_ids": [7], "meta_info": {"finish_reason": None, "completion_tokens": 1}},
        {"output_ids": [7, 7], "meta_info": last["meta_info"] | {"completion_tokens": 2}},
    ]
    reply = StreamedReply(TokenCallback(lambda position, ids: True), lambda: None)
    take = reply.begin()
    for event in events:
        event["meta_info"]["output_token_logprobs"] = [[-0.5, 7, None]] * len(event["output_ids"])
        take(f"data: {json.dumps(event)}\n\n".encode())
    assert parse_routing(reply.result("/generate"), 2, EXPERTS) == numbers.astype("u1").tobytes()


def test_servers_are_started_with_the_arguments_for_routing(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path, mlp_only_layers=[])
    settings = SGLangSettings(folder=tmp_path, max_length=64, routing=True)
    arguments = server_arguments(settings)
    assert "--enable-return-routed-experts" in arguments
    assert ("--moe-runner-backend", "triton") in pairwise(arguments)
    assert settings.experts is not None
    assert settings.experts.per_token == 2

    # SGLang chooses the kernels of a quantized model.
    quantized = replace(settings, options={"quantization": "fp8"})
    assert "--moe-runner-backend" not in server_arguments(quantized)
    without_routing = replace(settings, routing=False)
    assert "--enable-return-routed-experts" not in server_arguments(without_routing)


def test_completions_of_sglang_have_experts(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[])
    engine = SGLangEngine(
        SGLangSettings(
            folder=tmp_path / "model",
            max_length=64,
            python=str(FAKE),
            start_s=60.0,
            routing=True,
            weights_folder=tmp_path / "weights",
            log=tmp_path / "server.log",
            compare_servers=False,
        )
    )

    async def run() -> None:
        completion = await engine.generate([5, 6, 7], Sampling(max_tokens=2))
        # The stand-in of the server sends experts 0 and 1 for each of 4 tokens in two layers.
        assert completion.routing == bytes([0, 1] * 2 * 4)
        end_reply = TokenCallback(lambda position, token_ids: False)
        aborted = await engine.stream([5, 6, 7], Sampling(max_tokens=50), end_reply)
        assert aborted.finish_reason == "abort"
        assert len(aborted.token_ids) < 50
        assert aborted.routing == bytes([0, 1] * 2 * (3 + len(aborted.token_ids) - 1))

    try:
        asyncio.run(run())
    finally:
        engine.close()
