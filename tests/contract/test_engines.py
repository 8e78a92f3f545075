"""Every engine keeps the promises of `rollout.engines`; Hugging Face computes what is right."""

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
from rollout.engines import TokenCallback
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.records.trajectory import Completion, Sampling
from tests.support.tiny import MAX_LENGTH, VOCAB, make_model

LOGPROB_TOLERANCE = (
    5e-5  # nats; float32 sums in another order move a log-probability by up to about 1.5e-5
)

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine under test and the model whose weights it was given."""

    engine: Any
    model: Qwen2ForCausalLM
    seeded: bool = True  # equal seeds give equal tokens

    def same(self, seed: int, **fields: Any) -> Sampling:
        """A sampling that gives the same tokens every time: by its seed, or greedy where seeds are not honoured."""
        return Sampling(seed=seed, **fields) if self.seeded else Sampling(temperature=0.0, **fields)


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
    """Each test starts from the folder's weights at version 0, with nothing cached."""
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


def ask(engine: Any, requests: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt, sampling) for prompt, sampling in requests)
        )

    return asyncio.run(run())


def test_a_stream_tells_the_tokens_of_the_reply_and_ends_when_nobody_listens(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rollout.engines.embedded.engine._EXCHANGE_S", 0.0
    )  # each call to the actor is one token
    heard: list[list[int]] = []

    def note(place: int, token_ids: Sequence[int]) -> bool:
        heard.append([*(heard[-1][:place] if heard else []), *token_ids])
        return len(heard) < most

    hear = TokenCallback(note)
    most = 10**6
    sampling = subject.same(3, max_tokens=60)
    (whole,) = ask(subject.engine, [([5, 6, 7], sampling)])
    told = asyncio.run(subject.engine.stream([5, 6, 7], sampling, hear))
    assert (told.token_ids, told.finish_reason) == (whole.token_ids, "length")
    assert np.abs(np.array(told.logprobs) - whole.logprobs).max() < LOGPROB_TOLERANCE
    assert heard and all(tuple(ids) == whole.token_ids[: len(ids)] for ids in heard)
    heard.clear()
    most = 1
    long = subject.same(3, max_tokens=MAX_LENGTH - 3)
    cut = asyncio.run(subject.engine.stream([5, 6, 7], long, hear))
    assert cut.finish_reason == "abort" and len(heard[0]) <= len(cut.token_ids) < MAX_LENGTH - 3
    assert cut.token_ids[: len(heard[0])] == tuple(heard[0])


def prompts(count: int, seed: int, low: int = 1, high: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


@torch.no_grad()
def reference(
    model: Qwen2ForCausalLM, prompt: list[int], tokens: Sequence[int], temperature: float
) -> torch.Tensor:
    logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def worst(
    model: Qwen2ForCausalLM, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> float:
    right = reference(model, prompt, completion.token_ids, temperature)
    return float((right - torch.tensor(completion.logprobs)).abs().max())


@torch.no_grad()
def allowed(
    model: Qwen2ForCausalLM, prompt: list[int], tokens: Sequence[int], sampling: Sampling
) -> list[frozenset[int]]:
    """The tokens that top-k and top-p leave to draw from, position by position; both look at all tokens."""
    logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    probabilities, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    keep = (
        probabilities.cumsum(-1) - probabilities < sampling.top_p + 1e-5
    )  # the mass of all that are more likely
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    return [frozenset(row[kept].tolist()) for row, kept in zip(order, keep, strict=True)]


def test_logprobs_are_those_of_hugging_face(subject: Subject) -> None:
    requests = [
        (prompt, Sampling(temperature=(0.7, 1.0, 1.3)[i % 3], max_tokens=1 + 7 * i % 41, seed=i))
        for i, prompt in enumerate(prompts(30, seed=1))
    ]
    for (prompt, sampling), completion in zip(requests, ask(subject.engine, requests), strict=True):
        assert len(completion.token_ids) == sampling.max_tokens
        assert completion.finish_reason == "length"
        assert worst(subject.model, prompt, completion, sampling.temperature) < LOGPROB_TOLERANCE


def test_greedy_is_hugging_faces_greedy(subject: Subject) -> None:
    for prompt in prompts(5, seed=2):
        sampling = Sampling(temperature=0.0, max_tokens=20)
        (completion,) = ask(subject.engine, [(prompt, sampling)])
        ids = torch.tensor([prompt])
        settings = {
            "max_new_tokens": 20,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        right = subject.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
            0, len(prompt) :
        ]
        assert completion.token_ids == tuple(right.tolist())
        assert worst(subject.model, prompt, completion) < LOGPROB_TOLERANCE  # at temperature 1


def test_every_request_is_sampled_as_it_asks(subject: Subject) -> None:
    kinds = [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.9, "top_k": 20}, {}]
    requests = [
        (prompt, Sampling(temperature=(0.8, 1.2)[i % 2], max_tokens=12, seed=i, **kinds[i % 5]))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts(20, seed=11))
    ]
    together = ask(subject.engine, requests)
    alone = [ask(subject.engine, [request])[0] for request in requests[:5]]
    outside = 0
    for (prompt, sampling), completion in zip(
        requests + requests[:5], together + alone, strict=True
    ):
        kept = allowed(subject.model, prompt, completion.token_ids, sampling)
        assert all(token in row for token, row in zip(completion.token_ids, kept, strict=True))
        # of the full distribution, whatever was cut from it to sample
        assert worst(subject.model, prompt, completion, sampling.temperature) < LOGPROB_TOLERANCE
        if not (sampling.top_k or sampling.top_p < 1):
            tight = allowed(
                subject.model, prompt, completion.token_ids, replace(sampling, top_p=0.3)
            )
            outside += sum(
                token not in row for token, row in zip(completion.token_ids, tight, strict=True)
            )
    assert outside > 10  # the settings of others do not bind who has none


def test_a_request_does_not_see_its_batch(subject: Subject) -> None:
    crowd = [
        (prompt, subject.same(i, max_tokens=25)) for i, prompt in enumerate(prompts(40, seed=3))
    ]
    together = ask(subject.engine, crowd)
    for i in (0, 17, 39):
        asyncio.run(subject.engine.load_weights(weights(0), 0))  # alone, and with nothing cached
        (alone,) = ask(subject.engine, [crowd[i]])
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=LOGPROB_TOLERANCE)
    assert len({completion.token_ids for completion in together}) > 30


def test_siblings_share_a_prompt_but_not_a_seed(subject: Subject) -> None:
    prompt = prompts(1, seed=4, low=50)[0]
    siblings = ask(
        subject.engine, [(prompt, Sampling(max_tokens=12, seed=seed)) for seed in (5, 6, 5, 7)]
    )
    if subject.seeded:
        assert siblings[0].token_ids == siblings[2].token_ids
        assert len({sibling.token_ids for sibling in siblings}) == 3
        assert [sibling.cached_tokens for sibling in siblings] == [0] + [len(prompt)] * 3
    else:
        assert len({sibling.token_ids for sibling in siblings}) == 4
    for sibling in siblings:
        assert worst(subject.model, prompt, sibling) < LOGPROB_TOLERANCE


def test_a_next_turn_goes_on_from_the_last(subject: Subject) -> None:
    prompt = prompts(1, seed=5, low=50)[0]
    (first,) = ask(subject.engine, [(prompt, Sampling(max_tokens=10, seed=1))])
    longer = [*prompt, *first.token_ids, 3, 4, 5]
    (second,) = ask(subject.engine, [(longer, Sampling(max_tokens=10, seed=2))])
    assert second.cached_tokens == len(prompt) + 9  # the last token was sampled but never run
    assert worst(subject.model, longer, second) < LOGPROB_TOLERANCE


def test_stop_tokens_end_a_completion(subject: Subject) -> None:
    prompt = prompts(1, seed=6)[0]
    (free,) = ask(subject.engine, [(prompt, subject.same(9, max_tokens=30))])
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    (stopped,) = ask(
        subject.engine, [(prompt, subject.same(9, max_tokens=30, stop=(stop, VOCAB + 1)))]
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    (exact,) = ask(subject.engine, [(prompt, subject.same(9, max_tokens=first + 1, stop=(stop,)))])
    assert exact.finish_reason == "stop"  # stopped by itself on its very last token


def test_a_completion_may_fill_the_engine_to_the_last_token(subject: Subject) -> None:
    long = prompts(1, seed=12, low=89)[0] + prompts(1, seed=13, low=89)[0]
    assert len(long) >= MAX_LENGTH - 1
    asked = [
        (long[: MAX_LENGTH - new], Sampling(max_tokens=new, seed=new))
        for new in (1, 2, MAX_LENGTH - 1)
    ]
    for (prompt, sampling), completion in zip(asked, ask(subject.engine, asked), strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (
            sampling.max_tokens,
            "length",
        )
        assert [(span.start, span.end) for span in completion.versions] == [
            (0, sampling.max_tokens)
        ]
        assert worst(subject.model, prompt, completion) < LOGPROB_TOLERANCE


def test_new_weights_answer_a_cached_prompt(subject: Subject) -> None:
    prompt = prompts(1, seed=7, low=60)[0]
    ask(subject.engine, [(prompt, Sampling(max_tokens=5))])
    asyncio.run(subject.engine.load_weights(iter(weights(1)), 7))
    (completion,) = ask(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.cached_tokens == 0
    assert [(span.version, span.start, span.end) for span in completion.versions] == [(7, 0, 5)]
    assert worst(make_model(1), prompt, completion) < LOGPROB_TOLERANCE
    assert worst(subject.model, prompt, completion) > 0.1


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
    (completion,) = ask(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert completion.versions[0].version == 0
    assert worst(subject.model, prompt, completion) < LOGPROB_TOLERANCE
    asyncio.run(subject.engine.load_weights(weights(1), 4))
    (completion,) = ask(subject.engine, [(prompt, Sampling(max_tokens=5))])
    assert worst(make_model(1), prompt, completion) < LOGPROB_TOLERANCE


def test_an_update_may_come_in_the_middle(subject: Subject) -> None:
    prompt = prompts(1, seed=9, high=20)[0]
    new = MAX_LENGTH - len(prompt)
    versions = [list(weights(0)), list(weights(1))]  # made before the race begins

    async def run(delay_s: float) -> Completion:
        await subject.engine.load_weights(versions[0], 0)
        running = asyncio.create_task(subject.engine.generate(prompt, Sampling(max_tokens=new)))
        await asyncio.sleep(delay_s)
        await subject.engine.load_weights(versions[1], 1)
        return await running

    for attempt in range(300):  # until an update did come in the middle
        completion = asyncio.run(run(attempt % 25 * 0.002))
        spans = completion.versions
        if len(spans) == 2:
            break
    assert [span.version for span in spans] == [0, 1]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, new)
    old = spans[0].end
    assert 0 < old < new
    logprobs = torch.tensor(completion.logprobs)
    off = (logprobs - reference(subject.model, prompt, completion.token_ids, 1.0)).abs()
    assert off[:old].max() < LOGPROB_TOLERANCE
    assert off[old:].median() > 0.1  # the others are not of the old weights, from the first one on
    assert off[old] > 1e-3


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
        gone = asyncio.create_task(subject.engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0.005)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await subject.engine.generate([1, 2, 3], Sampling(max_tokens=4))

    assert len(asyncio.run(run()).token_ids) == 4


@pytest.mark.slow
def test_hosted_calls_are_few_and_its_death_is_told(folder: Path, running_ray: None) -> None:

    engine = HostedEngine(EmbeddedSettings(folder=folder, max_length=MAX_LENGTH, rows=48))
    model = make_model(2)

    async def run() -> tuple[list[Completion], BaseException, BaseException]:
        await engine.load_weights(weights(2), 5)
        sampling = Sampling(max_tokens=20)
        done = await asyncio.gather(
            *(engine.generate(prompt, sampling) for prompt in prompts(200, seed=10))
        )
        exchanges = engine.exchanges
        assert exchanges < 60
        under_way = asyncio.create_task(engine.generate([8, 8], Sampling(max_tokens=150)))
        await asyncio.sleep(0.01)
        assert engine._shared[0].interrupt[0] == 0  # everything new has been handed over
        another = asyncio.create_task(engine.generate([7, 7], Sampling(max_tokens=2)))
        await asyncio.sleep(0)
        assert engine._shared[0].interrupt[0] == 1
        await asyncio.gather(under_way, another)
        gone = asyncio.create_task(engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await engine.sleep()  # what nobody waits for keeps no engine awake
        with pytest.raises(EngineError, match="the engine sleeps; wake it first"):
            await engine.generate([1], Sampling(max_tokens=1))
        await engine.wake()
        running = asyncio.create_task(engine.generate([9, 9], Sampling(max_tokens=150)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot sleep while requests are running"):
            await engine.sleep()
        await engine.wake()  # awake already
        done[0] = await running
        waiting = asyncio.gather(
            engine.generate([1], Sampling(max_tokens=150)), return_exceptions=True
        )
        await asyncio.sleep(0)
        engine.close()
        late = await asyncio.gather(engine.load_weights(weights(0), 1), return_exceptions=True)
        return done, (await waiting)[0], late[0]

    done, waiting, late = asyncio.run(run())
    asked = [[9, 9], *prompts(200, seed=10)[1:]]
    assert (
        max(worst(model, prompt, one) for prompt, one in zip(asked, done, strict=True))
        < LOGPROB_TOLERANCE
    )
    assert isinstance(waiting, EngineError)
    assert "actor failed" in str(waiting)
    assert isinstance(late, EngineError)
    with pytest.raises(EngineError, match="/nowhere: no model here"):
        HostedEngine(EmbeddedSettings(folder="/nowhere", max_length=MAX_LENGTH))
