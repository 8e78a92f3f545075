"""Grammars on a real SGLang server: valid replies, and log-probabilities over the allowed tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings
from rollout.gateway.formats import ReplyFormat
from rollout.models.grammars import Grammars, ReplyConstraint, unpack_masks
from rollout.records.trajectory import Completion, Sampling
from tests.contract.test_engines import LOGPROB_TOLERANCE
from tests.support.gateway import tiny_model
from tests.support.sglang_server import server_settings
from tests.support.templates import renderer_of

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

VOCAB = 259
PROMPT = list(b"What is 3 + 4?")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sum", "product"]},
        "value": {"type": "integer", "minimum": -50, "maximum": 999},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "value"],
    "additionalProperties": False,
}


def test_replies_follow_the_schema_and_have_renormalised_logprobs(
    sglang: str, tmp_path: Path
) -> None:
    """Send constrained and free requests at a time; compute their log-probabilities in plain torch."""
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    folder = tmp_path / "model"
    renderer = renderer_of("qwen2.5", folder)
    model = tiny_model(folder, 160)
    model.config.eos_token_id = renderer.stop[0]
    model.config.save_pretrained(folder)
    grammar = renderer.grammar(ReplyConstraint.of(SCHEMA, ()), PROMPT)
    server = server_settings()
    engine = SGLangEngine(
        SGLangSettings(
            folder=folder,
            max_length=160,
            rows=48,
            python=sglang,
            weights_folder=tmp_path / "weights",
            log=tmp_path / "server.log",
            start_s=1500.0,
            options=server["options"] | {"grammar-backend": "llguidance"},
            environment=server["environment"],
            grammar=True,
        )
    )
    constrained = Sampling(max_tokens=120, stop=renderer.stop, temperature=0.7, grammar=grammar)
    free = Sampling(max_tokens=20, temperature=0.7, candidates=2)

    async def run() -> list[Completion]:
        requests = [constrained] * 12 + [free] * 4
        return await asyncio.gather(*(engine.generate(PROMPT, request) for request in requests))

    try:
        completions = asyncio.run(run())
    finally:
        engine.close()

    for number, completion in enumerate(completions):
        token_ids = completion.token_ids
        is_allowed = np.ones((len(token_ids), VOCAB), dtype=bool)
        if number < 12:
            assert completion.finish_reason == "stop"
            assert ReplyFormat(schema=SCHEMA).accepts(renderer.decode(token_ids))
            is_allowed = unpack_masks(np.stack(Grammars(folder).masks(grammar, token_ids)), VOCAB)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        logits = (logits / 0.7).masked_fill(~torch.from_numpy(is_allowed), -torch.inf)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)
        if number >= 12:
            likeliest = logits.log_softmax(-1).topk(2)
            for row, token, logprob in zip(
                completion.candidates, likeliest.indices, likeliest.values, strict=True
            ):
                assert [candidate for candidate, _ in row] == token.tolist()
                values = [value for _, value in row]
                assert values == pytest.approx(logprob.tolist(), abs=LOGPROB_TOLERANCE)
