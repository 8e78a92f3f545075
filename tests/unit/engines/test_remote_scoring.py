"""Scores of servers: of OpenAI's completions API, whose answers a real model computes, and of SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollout.base.errors import EngineError
from rollout.engines import ScoredReply
from rollout.engines.remote import RemoteError
from rollout.engines.remote.config import RemoteConfig
from rollout.engines.remote.scoring import RemoteScorer
from rollout.engines.sglang.client import parse_scores, scoring_body
from tests.support.chat_server import Response, chat_server
from tests.support.tiny import make_model

MODEL = make_model(0)
REPLIES = [
    ScoredReply(prompt_ids=[5, 6, 7], completion_ids=[8, 9]),
    ScoredReply(prompt_ids=[1], completion_ids=[2, 3, 4, 5]),
]


def echo(body: dict[str, Any], number: int) -> Response:
    """Answer as vLLM does: the tokens of the prompt and the sampled one, with log-probabilities."""
    token_ids = body["prompt"]
    with torch.no_grad():
        logprobs = MODEL(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    sampled = int(logprobs[-1].argmax())
    following = [*token_ids[1:], sampled]
    values = [float(row[token]) for row, token in zip(logprobs, following, strict=True)]
    answer = {
        "tokens": [f"Ġ{token}" for token in (*token_ids, sampled)],
        "token_logprobs": [None, *values],
    }
    return Response(json.dumps({"choices": [{"text": "", "logprobs": answer}]}).encode())


def score(url: str, replies: list[ScoredReply], **settings: Any) -> list[list[float]]:
    async def run() -> list[list[float]]:
        scorer = RemoteScorer(RemoteConfig(model="big", url=url, retries=0, **settings))
        try:
            return await scorer.score(replies)
        finally:
            await scorer.aclose()

    return asyncio.run(run())


def check_tokens(url: str, texts: list[str], token_ids: Sequence[int] = (5, 6)) -> None:
    async def run() -> None:
        scorer = RemoteScorer(RemoteConfig(model="big", url=url, retries=0))
        try:
            await scorer.check_tokens(token_ids, texts)
        finally:
            await scorer.aclose()

    asyncio.run(run())


def test_scores_are_the_log_probabilities_of_the_reply() -> None:
    with chat_server(echo) as server:
        scores = score(server.url, REPLIES)
    for reply, values in zip(REPLIES, scores, strict=True):
        token_ids = [*reply.prompt_ids, *reply.completion_ids]
        with torch.no_grad():
            logprobs = MODEL(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        first = len(reply.prompt_ids) - 1
        expected = [
            float(logprobs[first + number, token])
            for number, token in enumerate(reply.completion_ids)
        ]
        assert values == pytest.approx(expected, abs=1e-6)
    body = next(body for body in server.bodies if body["prompt"][0] == 1)
    assert body == {
        "model": "big",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 1,
        "temperature": 1.0,
        "echo": True,
        "logprobs": 1,
    }


# Answers to the tokens 5, 6, 7, 8, 9 with 3 sampled behind them, in the shape of vLLM at 030ea52e (`entrypoints/openai/
# completion/serving.py`) and of SGLang 0.5.23 (`srt/entrypoints/openai/serving_completions.py`). vLLM writes -9999 in
# place of minus infinity.
TOKENS = [" 5", " 6", " 7", " 8", " 9", " 3"]
TOKEN_LOGPROBS = [None, -1.5, -2.5, -3.5, -4.5, -9999.0]
VLLM_ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "big",
    "choices": [
        {
            "index": 0,
            "text": " 5 6 7 8 9 3",
            "logprobs": {
                "text_offset": [0, 2, 4, 6, 8, 10],
                "token_logprobs": TOKEN_LOGPROBS,
                "tokens": TOKENS,
                "top_logprobs": [
                    None,
                    {" 6": -1.5},
                    {" 7": -2.5, " 1": -0.5},
                    {" 8": -3.5, " 1": -0.5},
                    {" 9": -4.5, " 1": -0.5},
                    {" 3": -9999.0, " 1": -0.5},
                ],
            },
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": [
                None,
                {"6": {"logprob": -1.5, "rank": 1, "decoded_token": " 6"}},
                {"7": {"logprob": -2.5, "rank": 4, "decoded_token": " 7"}},
                {"8": {"logprob": -3.5, "rank": 4, "decoded_token": " 8"}},
                {"9": {"logprob": -4.5, "rank": 4, "decoded_token": " 9"}},
            ],
            "prompt_token_ids": None,
        }
    ],
    "usage": {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1},
}
SGLANG_ANSWER = {
    "id": "1",
    "object": "text_completion",
    "created": 1,
    "model": "default",
    "choices": [
        {
            "index": 0,
            "text": " 5 6 7 8 9 3",
            "logprobs": {
                "text_offset": [-1] * 6,
                "token_logprobs": TOKEN_LOGPROBS,
                "tokens": TOKENS,
                "top_logprobs": [None, *({" 1": -0.5} for _ in range(5))],
            },
            "finish_reason": "length",
            "matched_stop": None,
        }
    ],
    "usage": {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1},
    "metadata": {"weight_version": "default"},
}


@pytest.mark.parametrize("answer", [VLLM_ANSWER, SGLANG_ANSWER], ids=["vllm", "sglang"])
def test_the_answers_of_servers_are_read(answer: dict[str, Any]) -> None:
    with chat_server(Response(json.dumps(answer).encode())) as server:
        assert score(server.url, REPLIES[:1]) == [[-3.5, -4.5]]
        check_tokens(server.url, TOKENS[:5], [5, 6, 7, 8, 9])
        with pytest.raises(RemoteError, match="token 9 is ' 9' there and '9' in the student's"):
            check_tokens(server.url, [*TOKENS[:4], "9"], [5, 6, 7, 8, 9])


def test_a_tokenizer_that_reads_tokens_otherwise_is_refused() -> None:
    with chat_server(echo) as server:
        check_tokens(server.url, [" 5", " 6"])
        message = "token 6 is ' 6' there and ' six' in the student's tokenizer"
        with pytest.raises(RemoteError, match=message):
            check_tokens(server.url, [" 5", " six"])


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "42", "logprobs": None}]},
        {"choices": [{"text": "42", "logprobs": {"tokens": ["42"], "token_logprobs": [-1.0]}}]},
        {"error": "no"},
    ],
)
def test_a_server_that_does_not_echo_is_refused(answer: dict[str, Any]) -> None:
    with (
        chat_server(Response(json.dumps(answer).encode())) as server,
        pytest.raises(EngineError, match="`echo` with `logprobs`"),
    ):
        score(server.url, REPLIES)


@pytest.mark.parametrize("tokens", [None, ["5"]], ids=["none", "one of two"])
def test_a_server_that_leaves_out_the_texts_of_tokens_is_refused(tokens: Any) -> None:
    logprobs = {"tokens": tokens, "token_logprobs": [None, -1.0]}
    answer = {"choices": [{"text": "", "logprobs": logprobs}]}
    with (
        chat_server(Response(json.dumps(answer).encode())) as server,
        pytest.raises(EngineError, match="log-probabilities without the texts of the tokens"),
    ):
        check_tokens(server.url, ["5", "6"])


def test_a_wrong_model_is_one_line() -> None:
    with (
        chat_server(Response(b"no such model", status=404)) as server,
        pytest.raises(RemoteError, match="status 404: no such model; check url, model and key"),
    ):
        score(server.url, REPLIES)


def test_sglang_is_asked_for_the_tokens_of_the_reply_alone() -> None:
    reply = ScoredReply(prompt_ids=[5, 6], completion_ids=[7, 8])
    body = scoring_body(reply, adapter="solver-v3")
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["logprob_start_len"] == 1
    assert body["lora_path"] == "solver-v3"
    with pytest.raises(EngineError, match=r"at temperature 1 only, not at 0\.7"):
        scoring_body(ScoredReply(prompt_ids=[5], completion_ids=[7], temperature=0.7))


def test_the_entry_of_the_prompts_last_token_is_not_a_score() -> None:
    reply = ScoredReply(prompt_ids=[5, 6], completion_ids=[7, 8])
    entries = [[None, 6, None], [-1.0, 7, None], [-2.0, 8, None]]
    answer: dict[str, Any] = {"meta_info": {"input_token_logprobs": entries}}
    assert parse_scores(answer, reply, vocab=96) == [-1.0, -2.0]
    entries[2][0] = None
    with pytest.raises(EngineError, match="no log-probability for token 1 of a reply"):
        parse_scores(answer, reply, vocab=96)
    with pytest.raises(EngineError, match="no log-probabilities of the 2 tokens"):
        parse_scores({"meta_info": {}}, reply, vocab=96)


def test_the_id_0_stands_for_the_vocabularys_last_token_and_other_ids_are_refused() -> None:
    reply = ScoredReply(prompt_ids=[5, 6], completion_ids=[7, 95])
    entries = [[None, 6, None], [-1.0, 7, None], [-2.0, 0, None]]
    answer: dict[str, Any] = {"meta_info": {"input_token_logprobs": entries}}
    assert parse_scores(answer, reply, vocab=96) == [-1.0, -2.0]
    # A token outside of the vocabulary is written as 0 too, and has no log-probability of its own.
    outside = ScoredReply(prompt_ids=[5, 6], completion_ids=[7, 96])
    with pytest.raises(EngineError, match="no log-probabilities of the 2 tokens"):
        parse_scores(answer, outside, vocab=96)
    entries[2][1] = 8
    with pytest.raises(EngineError, match="no log-probabilities of the 2 tokens"):
        parse_scores(answer, reply, vocab=96)
