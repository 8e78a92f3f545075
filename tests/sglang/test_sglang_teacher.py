"""Log-probabilities of given replies from a real SGLang server, by both of its APIs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from rollout.engines import ScoredReply
from rollout.engines.remote import RemoteError
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.scoring import RemoteScorer
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings
from rollout.records.trajectory import Sampling
from tests.contract.test_engines import LOGPROB_TOLERANCE
from tests.support.gateway import tiny_model
from tests.support.sglang_server import server_settings
from tests.support.templates import renderer_of

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

MAX_LENGTH = 160
TEXT = "The answer is 42.\n"


def test_a_server_scores_replies_as_the_model_does(sglang: str, tmp_path: Path) -> None:
    """Compare `/v1/completions` with `echo`, and `/generate`, with log-probabilities in plain torch."""
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    folder = tmp_path / "model"
    renderer = renderer_of("qwen2.5", folder)
    model = tiny_model(folder, MAX_LENGTH)
    draw = random.Random(0)
    replies = [
        ScoredReply(
            prompt_ids=[draw.randrange(256) for _ in range(prompt_length)],
            completion_ids=[draw.randrange(256) for _ in range(reply_length)],
        )
        for prompt_length, reply_length in ((1, 5), (20, 1), (64, 64), (64, 3))
    ]
    engine = SGLangEngine(
        SGLangSettings(
            folder=folder,
            max_length=MAX_LENGTH,
            rows=48,
            python=sglang,
            weights_folder=tmp_path / "weights",
            log=tmp_path / "server.log",
            start_s=1500.0,
            options=server_settings()["options"] | {"skip-tokenizer-init": False},
            environment=server_settings()["environment"],
        )
    )
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(engine.settings.server_key)

    async def run() -> tuple[list[list[float]], list[list[float]]]:
        await engine.generate([1, 2, 3], Sampling(max_tokens=1))  # starts the server
        url = f"{engine.fleet.replicas[0].client.url}/v1"
        scorer = RemoteScorer(RemoteConfig(model="default", url=url, key_file=key_file))
        try:
            token_ids = renderer.encode(TEXT)
            texts = renderer.token_texts(token_ids)
            await scorer.check_tokens(token_ids, texts)
            with pytest.raises(RemoteError, match="needs the tokenizer of its student"):
                await scorer.check_tokens(token_ids, [*texts[:-1], "?"])
            return await scorer.score(replies), await engine.score(replies)
        finally:
            await scorer.aclose()

    try:
        echoed, generated = asyncio.run(run())
    finally:
        engine.close()

    for reply, by_echo, by_generate in zip(replies, echoed, generated, strict=True):
        token_ids = [*reply.prompt_ids, *reply.completion_ids]
        with torch.no_grad():
            logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        first = len(reply.prompt_ids) - 1
        expected = [
            float(logprobs[first + number, token])
            for number, token in enumerate(reply.completion_ids)
        ]
        assert by_echo == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert by_generate == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
