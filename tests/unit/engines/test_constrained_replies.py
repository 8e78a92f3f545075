"""Replies of the embedded engine under a grammar: always valid, with renormalised log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollout.base.errors import EngineError
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.gateway.formats import ReplyFormat
from rollout.models.chat_template import Renderer
from rollout.models.grammars import Grammars, ReplyConstraint, unpack_masks
from rollout.models.tool_calls import ToolSchema, parse_reply
from rollout.records.trajectory import Completion, Sampling
from tests.support import precision
from tests.support.embedded import LOGPROB_TOLERANCE, drain
from tests.support.gateway import tiny_model
from tests.support.templates import renderer_of

VOCAB = 259
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sum", "product"]},
        "value": {"type": "integer", "minimum": -50, "maximum": 999},
        "note": {"type": "string", "maxLength": 6},
        "steps": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "value"],
    "additionalProperties": False,
}
LOOK = ToolSchema(
    name="look",
    description="",
    parameters={
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Renderer, Qwen2ForCausalLM]:
    """Return the folder of an untrained model of bytes, its renderer, and Hugging Face's model."""
    folder = tmp_path_factory.mktemp("model")
    renderer = renderer_of("qwen2.5", folder)
    return folder, renderer, tiny_model(folder, 512)


def sample(engine: EmbeddedEngine, requests: list[Sampling]) -> dict[int, Any]:
    for number, sampling in enumerate(requests):
        engine.submit(number, list(b"What is 3 + 4?"), sampling)
    return drain(engine)


def test_every_reply_of_an_untrained_model_follows_the_schema(model: Any) -> None:
    folder, renderer, _ = model
    engine = EmbeddedEngine.from_folder(folder, max_length=512)
    grammar = renderer.grammar(ReplyConstraint.of(SCHEMA, ()), (1,))
    requests = [
        Sampling(max_tokens=400, stop=renderer.stop, seed=seed, grammar=grammar, temperature=1.2)
        for seed in range(200)
    ]
    outcomes = sample(engine, requests)
    reply_format = ReplyFormat(schema=SCHEMA)
    texts = [renderer.decode(outcomes[number].token_ids) for number in range(200)]
    assert {outcomes[number].finish_reason for number in range(200)} == {"stop"}
    assert all(map(reply_format.accepts, texts))
    assert len(set(texts)) > 150


def test_every_reply_of_an_untrained_model_makes_the_required_call(model: Any) -> None:
    folder, renderer, _ = model
    engine = EmbeddedEngine.from_folder(folder, max_length=512)
    constraint = ReplyConstraint.of(None, [LOOK], parallel_calls=False)
    grammar = renderer.grammar(constraint, (1,))
    requests = [
        Sampling(max_tokens=200, stop=renderer.stop, seed=seed, grammar=grammar)
        for seed in range(20)
    ]
    outcomes = sample(engine, requests)
    arguments = set()
    for number in range(20):
        text = renderer.decode_raw(outcomes[number].token_ids)
        (call,) = parse_reply(text, renderer.tool_format, "c").calls
        assert call.name == "look"
        arguments.add(call.arguments)
    assert arguments == {'{"at": "sky"}', '{"at": "sea"}'}


@torch.no_grad()
def masked_logprobs(
    model: Qwen2ForCausalLM, prompt: list[int], completion: Completion, masks: np.ndarray
) -> torch.Tensor:
    """Return the log-probabilities [C] of a completion, renormalised over the allowed tokens."""
    token_ids = torch.tensor(completion.token_ids)
    logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    logits = (logits / 0.7).masked_fill(~torch.from_numpy(masks), -torch.inf)
    return logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_the_allowed_tokens(model: Any, deterministic: bool) -> None:
    folder, renderer, reference = model
    engine = EmbeddedEngine.from_folder(folder, max_length=512, deterministic=deterministic)
    grammar = renderer.grammar(ReplyConstraint.of(SCHEMA, ()), (1,))
    requests = [
        Sampling(max_tokens=400, stop=renderer.stop, seed=seed, grammar=grammar, temperature=0.7)
        for seed in range(8)
    ]
    outcomes = sample(engine, requests)
    grammars = Grammars(folder)
    computed = []
    masks = []
    for number in range(8):
        completion = outcomes[number]
        allowed = unpack_masks(np.stack(grammars.masks(grammar, completion.token_ids)), VOCAB)
        logprobs = torch.tensor(completion.logprobs)
        is_forced = torch.from_numpy(allowed.sum(1) == 1)
        assert is_forced.sum() > 20
        assert (logprobs[is_forced] == 0).all()
        assert (logprobs[~is_forced] < 0).all()
        computed.append(logprobs)
        masks.append(allowed)

    def expected() -> torch.Tensor:
        prompt = list(b"What is 3 + 4?")
        rows = [masked_logprobs(reference, prompt, outcomes[i], masks[i]) for i in range(8)]
        return torch.cat(rows)

    float32 = expected()
    reference.double()  # converts the module in place
    try:
        precision.assert_close(torch.cat(computed), float32, expected())
    finally:
        reference.float()


def test_other_requests_of_a_batch_are_not_constrained(model: Any) -> None:
    folder, renderer, _ = model
    engine = EmbeddedEngine.from_folder(folder, max_length=128)
    grammar = renderer.grammar(ReplyConstraint.of({"enum": ["yes", "no"]}, ()), (1,))
    free = Sampling(max_tokens=20, stop=renderer.stop, seed=3)
    alone = sample(engine, [free])[0]
    constrained = Sampling(max_tokens=20, stop=renderer.stop, seed=3, grammar=grammar)
    outcomes = sample(engine, [constrained, free, constrained])
    assert outcomes[1].token_ids == alone.token_ids
    assert renderer.decode(outcomes[0].token_ids) in ('"yes"', '"no"')
    assert outcomes[0].token_ids == outcomes[2].token_ids


def test_a_request_with_an_invalid_grammar_fails_alone(model: Any) -> None:
    folder, _, _ = model
    engine = EmbeddedEngine.from_folder(folder, max_length=128)
    requests = [Sampling(max_tokens=2, grammar="start: missing_rule"), Sampling(max_tokens=2)]
    outcomes = sample(engine, requests)
    assert isinstance(outcomes[0], EngineError)
    assert "missing_rule" in str(outcomes[0])
    assert len(outcomes[1].token_ids) == 2

    without_tokenizer = EmbeddedEngine(engine.decoder)
    error = sample(without_tokenizer, requests)[0]
    assert "without the tokenizer" in str(error)


def test_candidates_are_the_likeliest_tokens_that_the_grammar_allows(model: Any) -> None:
    folder, renderer, reference = model
    engine = EmbeddedEngine.from_folder(folder, max_length=128)
    grammar = renderer.grammar(ReplyConstraint.of({"enum": ["yes", "no"]}, ()), (1,))
    constrained = Sampling(max_tokens=9, stop=renderer.stop, grammar=grammar, candidates=3)
    free = Sampling(max_tokens=4, temperature=0.7, candidates=2)
    outcomes = sample(engine, [constrained, free, Sampling(max_tokens=4)])

    quote, y, n = (renderer.encode(text)[0] for text in ('"', "y", "n"))
    first, second = outcomes[0].candidates[:2]
    assert first == ((quote, 0.0),)
    assert {token for token, _ in second} == {y, n}
    assert sum(np.exp(logprob) for _, logprob in second) == pytest.approx(1)

    completion = outcomes[1]
    prompt = list(b"What is 3 + 4?")
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    expected = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1).topk(2)
    assert [[token for token, _ in row] for row in completion.candidates] == (
        expected.indices.tolist()
    )
    logprobs = [[logprob for _, logprob in row] for row in completion.candidates]
    np.testing.assert_allclose(logprobs, expected.values.numpy(), atol=LOGPROB_TOLERANCE)
    assert outcomes[2].candidates == ()
