"""Guarantees of every engine, with transformers as the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollout.base.errors import EngineError
from rollout.engines import ScoredReply, TokenCallback
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.records.trajectory import Completion, Sampling
from tests.support.tiny import MAX_LENGTH, VOCAB, make_model

# Nats. Float32 sums in another order change a log-probability by up to about 1.5e-5.
LOGPROB_TOLERANCE = 5e-5

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Subject:
    """Engine under test, and a reference model with the same weights.

    Attributes:
        seeded: True if equal seeds give equal tokens.
    """

    engine: Any
    model: Qwen2ForCausalLM
    seeded: bool = True

    def reproducible(self, seed: int, **fields: Any) -> Sampling:
        """Return a sampling that gives the same tokens in every call: by its seed, or greedily."""
        if self.seeded:
            return Sampling(seed=seed, **fields)
        return Sampling(temperature=0.0, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


@pytest.fixture(
    params=[
        "embedded_local",
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang]),
    ],
    scope="module",
)
def subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    if request.param == "sglang":
        yield Subject(request.getfixturevalue("sglang_engine"), make_model(0), seeded=False)
        return
    if request.param == "embedded_local":
        core = EmbeddedEngine.from_folder(folder, max_length=MAX_LENGTH, rows=48)
        yield Subject(LocalEngine(core), make_model(0))
        return
    request.getfixturevalue("running_ray")
    engine = HostedEngine(EmbeddedSettings(folder=folder, max_length=MAX_LENGTH, rows=48))
    yield Subject(engine, make_model(0))
    engine.close()


@pytest.fixture(autouse=True)
def original_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Load the folder's weights as version 0 before each test, so that nothing is cached."""
    if "subject" in request.fixturenames:
        subject = request.getfixturevalue("subject")
        asyncio.run(subject.engine.load_weights(weights(0), 0))
    yield


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, tensor in make_model(seed).state_dict().items()
        if name != "lm_head.weight"
    ]


def generate_all(engine: Any, requests: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    """Send all requests (prompt, sampling) at once."""

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt, sampling) for prompt, sampling in requests)
        )

    return asyncio.run(run())


class RecordingCallback:
    """Token callback that records the reply so far, and ends it after `max_calls`."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.replies: list[list[int]] = []
        self._max_calls = max_calls

    def __call__(self, position: int, token_ids: Sequence[int]) -> bool:
        before = self.replies[-1][:position] if self.replies else []
        self.replies.append([*before, *token_ids])
        return self._max_calls is None or len(self.replies) < self._max_calls


@pytest.fixture
def one_token_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each call to a hosted engine's actor decode one token."""
    monkeypatch.setattr("rollout.engines.embedded.engine._EXCHANGE_S", 0.0)


def test_scores_of_replies_are_those_of_hugging_face(subject: Subject) -> None:
    """Replies of different lengths, one more than the engine computes in a pass."""
    lengths = [(3, 5), (1, 1), (40, 100), (7, 2)] * 4
    generator = np.random.default_rng(0)
    temperatures = [1.0, 0.5] if subject.seeded else [1.0]  # SGLang scores at 1 only
    replies = [
        ScoredReply(
            prompt_ids=generator.integers(VOCAB, size=prompt).tolist(),
            completion_ids=generator.integers(VOCAB, size=completion).tolist(),
            temperature=temperatures[number % len(temperatures)],
        )
        for number, (prompt, completion) in enumerate(lengths)
    ]
    scores = asyncio.run(subject.engine.score(replies))
    for reply, score in zip(replies, scores, strict=True):
        expected = reference_logprobs(
            subject.model, list(reply.prompt_ids), reply.completion_ids, reply.temperature
        )
        assert score == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)


def test_the_score_of_a_sampled_reply_is_its_log_probability(subject: Subject) -> None:
    sampling = subject.reproducible(3, max_tokens=20)
    (completion,) = generate_all(subject.engine, [([5, 6, 7], sampling)])
    reply = ScoredReply(prompt_ids=[5, 6, 7], completion_ids=completion.token_ids)
    (score,) = asyncio.run(subject.engine.score([reply]))
    assert score == pytest.approx(completion.logprobs, abs=LOGPROB_TOLERANCE)


def test_replies_that_cannot_be_scored_are_refused(subject: Subject) -> None:
    with pytest.raises(EngineError):
        asyncio.run(subject.engine.score([ScoredReply(prompt_ids=[1], completion_ids=[VOCAB])]))
    with pytest.raises(EngineError):
        long = ScoredReply(prompt_ids=[1], completion_ids=[2] * MAX_LENGTH)
        asyncio.run(subject.engine.score([long]))


@pytest.mark.usefixtures("one_token_exchanges")
def test_a_stream_reports_the_tokens_of_the_reply(subject: Subject) -> None:
    sampling = subject.reproducible(3, max_tokens=60)
    (expected,) = generate_all(subject.engine, [([5, 6, 7], sampling)])
    callback = RecordingCallback()
    streamed = asyncio.run(subject.engine.stream([5, 6, 7], sampling, TokenCallback(callback)))
    assert streamed.token_ids == expected.token_ids
    assert streamed.finish_reason == "length"
    assert streamed.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
    assert callback.replies
    for reply in callback.replies:
        assert tuple(reply) == expected.token_ids[: len(reply)]


@pytest.mark.usefixtures("one_token_exchanges")
def test_a_stream_ends_when_its_callback_returns_false(subject: Subject) -> None:
    sampling = subject.reproducible(3, max_tokens=MAX_LENGTH - 3)
    callback = RecordingCallback(max_calls=1)
    streamed = asyncio.run(subject.engine.stream([5, 6, 7], sampling, TokenCallback(callback)))
    (reply,) = callback.replies
    assert streamed.finish_reason == "abort"
    assert len(reply) <= len(streamed.token_ids) < MAX_LENGTH - 3
    assert streamed.token_ids[: len(reply)] == tuple(reply)


def prompts(count: int, seed: int, low: int = 1, high: int = 90) -> list[list[int]]:
    """Return random prompts of `low` to `high - 1` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


@torch.no_grad()
def reference_logprobs(
    model: Qwen2ForCausalLM, prompt: list[int], tokens: Sequence[int], temperature: float
) -> torch.Tensor:
    """Return the log-probabilities [T] that transformers gives the tokens of a reply."""
    logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def max_error(
    model: Qwen2ForCausalLM, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> float:
    """Return the largest difference of a log-probability from the reference."""
    expected = reference_logprobs(model, prompt, completion.token_ids, temperature)
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


@torch.no_grad()
def allowed_tokens(
    model: Qwen2ForCausalLM, prompt: list[int], tokens: Sequence[int], sampling: Sampling
) -> list[frozenset[int]]:
    """Return the tokens that top-k and top-p allow at each position of a reply."""
    logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    probabilities, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    mass_of_likelier = probabilities.cumsum(-1) - probabilities
    keep = mass_of_likelier < sampling.top_p + 1e-5
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    return [frozenset(row[mask].tolist()) for row, mask in zip(order, keep, strict=True)]


def test_logprobs_are_those_of_hugging_face(subject: Subject) -> None:
    requests = [
        (prompt, Sampling(temperature=(0.7, 1.0, 1.3)[i % 3], max_tokens=1 + 7 * i % 41, seed=i))
        for i, prompt in enumerate(prompts(30, seed=1))
    ]
    for (prompt, sampling), completion in zip(
        requests, generate_all(subject.engine, requests), strict=True
    ):
        assert len(completion.token_ids) == sampling.max_tokens
        assert completion.finish_reason == "length"
        assert (
            max_error(subject.model, prompt, completion, sampling.temperature) < LOGPROB_TOLERANCE
        )


def test_greedy_is_hugging_faces_greedy(subject: Subject) -> None:
    for prompt in prompts(5, seed=2):
        sampling = Sampling(temperature=0.0, max_tokens=20)
        (completion,) = generate_all(subject.engine, [(prompt, sampling)])
        ids = torch.tensor([prompt])
        expected = subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert completion.token_ids == tuple(expected[0, len(prompt) :].tolist())
        assert max_error(subject.model, prompt, completion) < LOGPROB_TOLERANCE  # at temperature 1


def test_every_request_is_sampled_with_its_own_settings(subject: Subject) -> None:
    truncations: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.3},
        {"top_p": 0.9, "top_k": 20},
        {},
    ]
    requests = []
    for i, prompt in enumerate(prompts(20, seed=11)):
        temperature = 0.8 if i % 2 == 0 else 1.2
        truncation = truncations[i % len(truncations)]
        sampling = Sampling(temperature=temperature, max_tokens=12, seed=i, **truncation)
        requests.append((prompt, sampling))
    together = generate_all(subject.engine, requests)
    alone = [generate_all(subject.engine, [request])[0] for request in requests[:5]]

    outside_top_p = 0  # tokens of requests without truncation that top-p 0.3 would not allow
    for (prompt, sampling), completion in zip(
        requests + requests[:5], together + alone, strict=True
    ):
        token_ids = completion.token_ids
        allowed = allowed_tokens(subject.model, prompt, token_ids, sampling)
        assert all(token in row for token, row in zip(token_ids, allowed, strict=True))
        # Log-probabilities are of the full distribution, before top-k and top-p.
        error = max_error(subject.model, prompt, completion, sampling.temperature)
        assert error < LOGPROB_TOLERANCE
        if sampling.top_k == 0 and sampling.top_p == 1:
            other_sampling = replace(sampling, top_p=0.3)
            allowed = allowed_tokens(subject.model, prompt, token_ids, other_sampling)
            outside_top_p += sum(
                token not in row for token, row in zip(token_ids, allowed, strict=True)
            )
    assert outside_top_p > 10


def test_a_request_does_not_see_its_batch(subject: Subject) -> None:
    requests = [
        (prompt, subject.reproducible(i, max_tokens=25))
        for i, prompt in enumerate(prompts(40, seed=3))
    ]
    together = generate_all(subject.engine, requests)
    for i in (0, 17, 39):
        asyncio.run(subject.engine.load_weights(weights(0), 0))  # nothing stays cached
        (alone,) = generate_all(subject.engine, [requests[i]])
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=LOGPROB_TOLERANCE)
    assert len({completion.token_ids for completion in together}) > 30


def test_siblings_share_a_prompt_but_not_a_seed(subject: Subject) -> None:
    prompt = prompts(1, seed=4, low=50)[0]
    requests = [(prompt, Sampling(max_tokens=12, seed=seed)) for seed in (5, 6, 5, 7)]
    siblings = generate_all(subject.engine, requests)
    if subject.seeded:
        assert siblings[0].token_ids == siblings[2].token_ids
        assert len({sibling.token_ids for sibling in siblings}) == 3
        assert [sibling.cached_tokens for sibling in siblings] == [0] + [len(prompt)] * 3
    else:
        assert len({sibling.token_ids for sibling in siblings}) == 4
    for sibling in siblings:
        assert max_error(subject.model, prompt, sibling) < LOGPROB_TOLERANCE


def test_the_next_turn_of_a_chat_reuses_the_keys_of_the_last(subject: Subject) -> None:
    prompt = prompts(1, seed=5, low=50)[0]
    (first,) = generate_all(subject.engine, [(prompt, Sampling(max_tokens=10, seed=1))])
    longer = [*prompt, *first.token_ids, 3, 4, 5]
    (second,) = generate_all(subject.engine, [(longer, Sampling(max_tokens=10, seed=2))])
    # The last token was sampled, but has no keys.
    assert second.cached_tokens == len(prompt) + 9
    assert max_error(subject.model, longer, second) < LOGPROB_TOLERANCE


def test_stop_tokens_end_a_completion(subject: Subject) -> None:
    prompt = prompts(1, seed=6)[0]
    (free,) = generate_all(subject.engine, [(prompt, subject.reproducible(9, max_tokens=30))])
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    (stopped,) = generate_all(
        subject.engine, [(prompt, subject.reproducible(9, max_tokens=30, stop=(stop, VOCAB + 1)))]
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    (exact,) = generate_all(
        subject.engine, [(prompt, subject.reproducible(9, max_tokens=first + 1, stop=(stop,)))]
    )
    # The stop token is the last one that max_tokens allows.
    assert exact.finish_reason == "stop"


def test_a_completion_may_fill_the_engine_to_the_last_token(subject: Subject) -> None:
    long = prompts(1, seed=12, low=89)[0] + prompts(1, seed=13, low=89)[0]
    assert len(long) >= MAX_LENGTH - 1
    requests = [
        (long[: MAX_LENGTH - max_tokens], Sampling(max_tokens=max_tokens, seed=max_tokens))
        for max_tokens in (1, 2, MAX_LENGTH - 1)
    ]
    completions = generate_all(subject.engine, requests)
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == sampling.max_tokens
        assert completion.finish_reason == "length"
        (span,) = completion.versions
        assert (span.start, span.end) == (0, sampling.max_tokens)
        assert max_error(subject.model, prompt, completion) < LOGPROB_TOLERANCE


def test_new_weights_answer_a_cached_prompt(subject: Subject) -> None:
    prompt = prompts(1, seed=7, low=60)[0]
    generate_all(subject.engine, [(prompt, Sampling(max_tokens=5))])
    asyncio.run(subject.engine.load_weights(iter(weights(1)), 7))
    (completion,) = generate_all(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.cached_tokens == 0
    assert [(span.version, span.start, span.end) for span in completion.versions] == [(7, 0, 5)]
    assert max_error(make_model(1), prompt, completion) < LOGPROB_TOLERANCE
    assert max_error(subject.model, prompt, completion) > 0.1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors[:-1], "tensor 'model.norm.weight' is missing"),
        (
            lambda tensors: [*tensors, ("model.extra.weight", torch.zeros(2))],
            "tensor 'model.extra.weight' is unknown",
        ),
        (
            lambda tensors: [*tensors, tensors[3]],
            r"tensor 'model\.layers\.0\.self_attn\..*' comes twice",
        ),
        (
            lambda tensors: [
                (name, tensor[:-1] if "layers.2.mlp.up" in name else tensor)
                for name, tensor in tensors
            ],
            r"tensor 'model.layers.2.mlp.up_proj.weight' has shape \[95, 48\]; expected \[96, 48\]",
        ),
    ],
)
def test_a_failed_update_changes_nothing(subject: Subject, spoil: Any, message: str) -> None:
    prompt = prompts(1, seed=8)[0]
    with pytest.raises(EngineError, match=message):
        asyncio.run(subject.engine.load_weights(spoil(weights(1)), 3))
    (completion,) = generate_all(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.versions[0].version == 0
    assert max_error(subject.model, prompt, completion) < LOGPROB_TOLERANCE
    asyncio.run(subject.engine.load_weights(weights(1), 4))
    (completion,) = generate_all(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert max_error(make_model(1), prompt, completion) < LOGPROB_TOLERANCE


def test_an_update_may_come_in_the_middle(subject: Subject) -> None:
    prompt = prompts(1, seed=9, high=20)[0]
    max_tokens = MAX_LENGTH - len(prompt)
    old_weights = weights(0)
    new_weights = weights(1)

    async def run(delay_s: float) -> Completion:
        await subject.engine.load_weights(old_weights, 0)
        sampling = Sampling(max_tokens=max_tokens)
        running = asyncio.create_task(subject.engine.generate(prompt, sampling))
        await asyncio.sleep(delay_s)
        await subject.engine.load_weights(new_weights, 1)
        return await running

    for attempt in range(300):  # until an update comes in the middle of a reply
        completion = asyncio.run(run(attempt % 25 * 0.002))
        spans = completion.versions
        if len(spans) == 2:
            break
    assert [span.version for span in spans] == [0, 1]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, max_tokens)
    first_new = spans[1].start
    assert 0 < first_new < max_tokens

    old_logprobs = reference_logprobs(subject.model, prompt, completion.token_ids, 1.0)
    errors = (torch.tensor(completion.logprobs) - old_logprobs).abs()
    assert errors[:first_new].max() < LOGPROB_TOLERANCE
    # All tokens of the second span, the first included, are not of the old weights.
    assert errors[first_new:].median() > 0.1
    assert errors[first_new] > 1e-3


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (
            [1] * 100,
            Sampling(max_tokens=61),
            "prompt of 100 tokens and max_tokens 61 exceed .* max_length 160",
        ),
        ([1], Sampling(max_tokens=160), "prompt of 1 tokens and max_tokens 160 exceed"),
        ([1] * 160, Sampling(max_tokens=1), "prompt of 160 tokens and max_tokens 1 exceed"),
        ([1] * 500, Sampling(max_tokens=1), "prompt of 500 tokens and max_tokens 1 exceed"),
        ([], Sampling(), "the prompt is empty"),
        ([-1], Sampling(max_tokens=5), r"token ids outside 0\.\.95"),
        ([1, VOCAB], Sampling(max_tokens=5), r"token ids outside 0\.\.95"),
        ([1], Sampling(max_tokens=0), "max_tokens is 0"),
        ([1], Sampling(max_tokens=5, temperature=-1.0), "temperature is -1.0"),
        ([1], Sampling(max_tokens=5, temperature=float("nan")), "temperature is nan"),
        ([1], Sampling(max_tokens=5, top_p=0.0), "top_p is 0.0"),
        ([1], Sampling(max_tokens=5, top_k=-1), "top_k -1"),
    ],
)
def test_a_bad_request_fails_alone(
    subject: Subject, prompt: list[int], sampling: Sampling, message: str
) -> None:
    async def run() -> tuple[Any, Completion]:
        bad = asyncio.create_task(subject.engine.generate(prompt, sampling))
        good = await subject.engine.generate([1, 2, 3], Sampling(max_tokens=3))
        return (await asyncio.gather(bad, return_exceptions=True))[0], good

    error, good = asyncio.run(run())
    assert len(good.token_ids) == 3
    with pytest.raises(EngineError, match=message):
        raise error


def test_a_cancelled_call_does_not_disturb_the_others(subject: Subject) -> None:
    async def run() -> Completion:
        cancelled = asyncio.create_task(subject.engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0.005)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await subject.engine.generate([1, 2, 3], Sampling(max_tokens=4))

    assert len(asyncio.run(run()).token_ids) == 4


@pytest.fixture
def hosted_engine(folder: Path, running_ray: None) -> Iterator[HostedEngine]:
    engine = HostedEngine(EmbeddedSettings(folder=folder, max_length=MAX_LENGTH, rows=48))
    yield engine
    engine.close()


@pytest.mark.slow
def test_concurrent_requests_share_calls_to_the_actor(hosted_engine: HostedEngine) -> None:
    requests = [(prompt, Sampling(max_tokens=20)) for prompt in prompts(200, seed=10)]
    asyncio.run(hosted_engine.load_weights(weights(2), 5))
    completions = generate_all(hosted_engine, requests)
    assert hosted_engine.exchanges < 60
    model = make_model(2)
    for (prompt, _), completion in zip(requests, completions, strict=True):
        assert max_error(model, prompt, completion) < LOGPROB_TOLERANCE


@pytest.mark.slow
def test_a_new_request_interrupts_the_actor(hosted_engine: HostedEngine) -> None:
    def is_interrupted() -> bool:
        return bool(hosted_engine._shared[0].interrupt[0])

    async def run() -> None:
        await hosted_engine.generate([1], Sampling(max_tokens=1))  # the actor has started
        first = asyncio.create_task(hosted_engine.generate([8, 8], Sampling(max_tokens=150)))
        await asyncio.sleep(0.01)
        assert not is_interrupted()  # the actor has got the request
        second = asyncio.create_task(hosted_engine.generate([7, 7], Sampling(max_tokens=2)))
        await asyncio.sleep(0)
        assert is_interrupted()
        await asyncio.gather(first, second)

    asyncio.run(run())


@pytest.mark.slow
def test_a_hosted_engine_sleeps_only_without_requests(hosted_engine: HostedEngine) -> None:
    async def run() -> Completion:
        cancelled = asyncio.create_task(hosted_engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await hosted_engine.sleep()  # a cancelled request does not keep it awake
        with pytest.raises(EngineError, match="the engine sleeps; wake it first"):
            await hosted_engine.generate([1], Sampling(max_tokens=1))
        await hosted_engine.wake()

        running = asyncio.create_task(hosted_engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot sleep while requests are running"):
            await hosted_engine.sleep()
        await hosted_engine.wake()  # it is awake already
        return await running

    completion = asyncio.run(run())
    assert max_error(make_model(0), [9, 9], completion) < LOGPROB_TOLERANCE


@pytest.mark.slow
def test_a_closed_engine_fails_open_requests_and_later_updates(
    hosted_engine: HostedEngine,
) -> None:
    async def run() -> None:
        open_request = asyncio.create_task(hosted_engine.generate([1], Sampling(max_tokens=150)))
        await asyncio.sleep(0)
        hosted_engine.close()
        with pytest.raises(EngineError):
            await hosted_engine.load_weights(weights(0), 1)
        with pytest.raises(EngineError, match="actor failed"):
            await open_request

    asyncio.run(run())


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused(running_ray: None) -> None:
    with pytest.raises(EngineError, match="/nowhere: no model here"):
        HostedEngine(EmbeddedSettings(folder="/nowhere", max_length=MAX_LENGTH))
