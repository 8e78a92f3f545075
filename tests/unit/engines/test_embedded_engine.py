"""Scheduling, weight updates, aborts, seeds and sleep of the embedded engine."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollout.base.errors import EngineError
from rollout.engines import EngineConfig, TokenCallback
from rollout.engines.build import EngineRequest
from rollout.engines.embedded import batching
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.build import build_local_engine
from rollout.engines.embedded.cache import KVCache
from rollout.engines.embedded.local import LocalEngine, LocalReplicas
from rollout.engines.embedded.requests import Report, Request
from rollout.engines.embedded.sampling import uniforms
from rollout.engines.protocol import ScoredReply
from rollout.records.trajectory import Completion, Sampling
from tests.support.embedded import (
    LOGPROB_TOLERANCE,
    drain,
    largest_logprob_error,
    make_qwen2,
    run_steps,
)

torch.set_num_threads(1)


def test_requests_wait_for_a_row(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    for i in range(5):
        engine.submit(i, [i, i + 1], Sampling(max_tokens=4, seed=i))
    # The first token of a reply is sampled with its prompt, the second by a decoding pass.
    assert engine.step() == []
    assert engine.stats.decode_tokens == 4
    completions = drain(engine)
    assert sorted(completions) == [0, 1, 2, 3, 4]
    assert engine.stats.steps == 9  # three waves of three passes
    assert not engine.has_work


def test_scoring_has_a_cache_of_one_layer(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a part has 1,024 tokens at most, or one reply, as long as its longest reply."""
    caches: list[tuple[int, int]] = []

    class RecordedCache(KVCache):
        def __init__(
            self, architecture: Any, rows: int, length: int, *args: Any, **kw: Any
        ) -> None:
            super().__init__(architecture, rows, length, *args, **kw)
            caches.append((rows, length))
            # Values of two heads with 8 elements of 4 bytes; lengths are multiples of 16.
            assert self.values.untyped_storage().nbytes() == rows * length * 2 * 8 * 4

    engine = EmbeddedEngine.from_folder(qwen2, max_length=2048, rows=2)
    monkeypatch.setattr(batching, "KVCache", RecordedCache)
    lengths = [16, 16, 496, 480, 16, 1040, 16]
    prompt = list(range(15))
    replies = [
        ScoredReply(prompt_ids=prompt, completion_ids=[1] * (length - 15)) for length in lengths
    ]
    scores = engine.score(replies)
    assert caches == [(2, 16), (2, 496), (1, 16), (1, 1040), (1, 16)]
    for reply, logprobs in zip(replies, scores, strict=True):
        assert engine.score([reply]) == [pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)]


@pytest.mark.parametrize("token", [-1, 64])
def test_a_reply_with_a_token_outside_the_vocabulary_is_not_scored(qwen2: Path, token: int) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    reply = ScoredReply(prompt_ids=[1, 2], completion_ids=[3, token, 4])
    with pytest.raises(EngineError, match=r"outside 0\.\.63"):
        engine.score([reply])


@pytest.mark.parametrize(
    ("interrupt", "notify_every", "steps_taken"),
    [
        (None, 0, 10),  # the client cannot interrupt: five times the budget of 2 s
        ([0], 0, 30),  # the client does not interrupt: 15 times the budget
        ([0], 16, 30),
        ([1], 0, 2),  # the client has interrupted
        ([0], 1, 2),  # the client wants every single token
    ],
)
def test_the_duration_of_an_exchange_depends_on_the_client(
    qwen2: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: list[int] | None,
    notify_every: int,
    steps_taken: int,
) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    if interrupt is not None:
        engine.interrupt = np.array(interrupt)
    seconds = itertools.count()  # a step takes one second
    clock = SimpleNamespace(monotonic=lambda: next(seconds), thread_time=time.thread_time)
    monkeypatch.setattr(batching, "time", clock)
    request = Request(
        id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=60), notify_every=notify_every
    )
    engine.exchange([request], [], 2.0)
    assert engine.stats.steps == steps_taken


def test_requests_lost_in_a_failed_step_do_not_shorten_later_exchanges(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    seconds = itertools.count()  # a step takes one second
    clock = SimpleNamespace(monotonic=lambda: next(seconds), thread_time=time.thread_time)
    monkeypatch.setattr(batching, "time", clock)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    # Both requests want every single token, which limits an exchange to its budget.
    requests = [
        Request(id=i, prompt_ids=[1, i], sampling=Sampling(max_tokens=60), notify_every=1)
        for i in range(2)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "decode", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.exchange(requests, [], 2.0)

    request = Request(id=2, prompt_ids=[1, 2], sampling=Sampling(max_tokens=60))
    engine.exchange([request], [], 2.0)
    assert engine.stats.steps == 10  # five times the budget


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    """Return version, first token and end of each version span."""
    return [(span.version, span.start, span.end) for span in completion.versions]


def test_update_in_the_middle_gives_two_spans_and_keeps_old_keys(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, version=3)
    other = make_qwen2(5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.submit(1, prompt, Sampling(max_tokens=10))
    run_steps(engine, 3)  # 4 tokens
    engine.load_weights(other.state_dict().items(), 4)
    engine.load_weights(other.state_dict().items(), 5)  # no token was sampled by version 4
    completion = drain(engine)[1]
    assert spans(completion) == [(3, 0, 4), (5, 4, 10)]
    engine.submit(2, [*prompt, *completion.token_ids], Sampling(max_tokens=10))
    after = drain(engine)[2]
    assert after.cached_tokens == 0  # keys of two versions are not reused
    assert largest_logprob_error(other, [*prompt, *completion.token_ids], after) < LOGPROB_TOLERANCE


def test_after_an_update_new_weights_read_old_keys(qwen2: Path) -> None:
    old = Qwen2ForCausalLM.from_pretrained(qwen2)
    new = make_qwen2(5)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [1, 2, 3, 4, 5]
    engine.submit(1, prompt, Sampling(max_tokens=9))
    run_steps(engine, 2)  # 3 tokens; the last has no keys yet
    engine.load_weights(new.state_dict().items(), 1)
    completion = drain(engine)[1]
    assert spans(completion) == [(0, 0, 3), (1, 3, 9)]

    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        before = old(ids[:, : 5 + 2], use_cache=True)
        after = new(ids[:, 5 + 2 : -1], past_key_values=before.past_key_values).logits[0]
    logits = torch.cat([before.logits[0, 4:], after])
    expected = logits.log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)
    # The new weights over keys of their own give other log-probabilities for every token.
    with torch.no_grad():
        logits = new(ids).logits[0, 4:-1]
    new_only = logits.log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert (new_only - expected).abs().min() > 1e-3


def reasons_and_sizes(outcomes: dict[int, Any]) -> dict[int, tuple[str, int]]:
    """Return finish reason and number of tokens of each completion, by request."""
    return {
        request: (completion.finish_reason, len(completion.token_ids))
        for request, completion in outcomes.items()
    }


def test_running_and_waiting_requests_can_be_aborted(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=1)
    running = 1
    waiting = 2
    later = 3
    unknown = 4
    engine.submit(running, [1, 2], Sampling(max_tokens=20))
    engine.submit(waiting, [1, 2], Sampling(max_tokens=20))
    engine.submit(later, [1, 2], Sampling(max_tokens=2))
    run_steps(engine, 2)
    engine.abort({running, waiting, unknown})
    completions = drain(engine)
    assert reasons_and_sizes(completions) == {
        running: ("abort", 3),
        waiting: ("abort", 0),
        later: ("length", 2),
    }
    assert completions[waiting].versions[-1].version == 0


def test_waiting_requests_get_the_rows_of_aborted_ones_in_their_order(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    for number in range(6):
        prompt_size = 50 if number == 2 else 3
        engine.submit(number, [number] * prompt_size, Sampling(max_tokens=14))
    run_steps(engine, 3)
    engine.abort({0, 1, 3})
    completions = dict(engine.step())
    assert reasons_and_sizes(completions) == {
        0: ("abort", 4),
        1: ("abort", 4),
        3: ("abort", 0),
    }
    engine.abort({0, 1, 3})  # has no effect on requests that have ended
    engine.submit(6, [6], Sampling(max_tokens=1))
    order = []
    while engine.has_work:
        order += [number for number, _ in engine.step()]
    # Requests 2 and 4 got the two rows, though the prompt of 2 is long; 5 and 6 waited for them.
    assert order == [2, 4, 6, 5]


def test_weights_that_are_not_finite_give_an_error(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    state = dict(model.state_dict())
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, [1, 2], Sampling(max_tokens=4, top_p=0.9))
    with pytest.raises(EngineError, match="weights version 8 give logits that are not finite"):
        raise drain(engine)[1]
    engine.load_weights(state.items(), 9)
    engine.submit(1, [1, 2], Sampling(max_tokens=4))
    assert largest_logprob_error(model, [1, 2], drain(engine)[1]) < LOGPROB_TOLERANCE


def test_keys_that_are_not_finite_do_not_reach_later_requests(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    state = dict(model.state_dict())
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, list(range(30)), Sampling(max_tokens=4))
    assert isinstance(drain(engine)[1], EngineError)
    engine.load_weights(state.items(), 9)
    # In one block of rows, the first prompt is padded to the width of the second.
    prompts = {1: [1, 2], 2: list(range(40, 60))}
    for key, prompt in prompts.items():
        engine.submit(key, prompt, Sampling(max_tokens=4))
    completions = drain(engine)
    for key, prompt in prompts.items():
        assert largest_logprob_error(model, prompt, completions[key]) < LOGPROB_TOLERANCE


def test_replicas_share_weights_and_equal_prompts_go_to_one_replica(qwen2: Path) -> None:
    alone = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64, deterministic=True))
    config = EngineConfig(slots=16, max_length=64, deterministic=True)
    request = EngineRequest(
        policies=["solver"], model=qwen2, config=config, log_folder=qwen2, trained=False
    )
    engine = build_local_engine(request, ["cpu", "cpu"])
    assert isinstance(engine, LocalReplicas)
    first, second = engine.engines
    assert first.core.decoder.halves is second.core.decoder.halves
    prompts = [[1, 2, number % 2] for number in range(12)]

    async def generate_all(
        engine: LocalEngine | LocalReplicas,
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=4, seed=number))
                for number, prompt in enumerate(prompts)
            )
        )
        return [(completion.token_ids, completion.logprobs) for completion in completions]

    assert asyncio.run(generate_all(engine)) == asyncio.run(generate_all(alone))
    # Each replica has computed one of the two prompts, once.
    assert first.core.stats.prefill_tokens == 3
    assert second.core.stats.prefill_tokens == 3


def test_engines_on_gpus_work_at_the_same_time(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2, timeout=60)

    def exchange_together(requests: list[Request], aborts: list[int]) -> list[Report]:
        """Wait until the other engine's exchange has begun too."""
        barrier.wait()
        reply = Completion(token_ids=(9,), logprobs=(0.0,), finish_reason="stop", versions=())
        return [(request.id, reply) for request in requests]

    engines = []
    for _ in range(2):
        core = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
        # Any device but a CPU; nothing is computed on it.
        monkeypatch.setattr(core.decoder, "device", torch.device("meta"))
        monkeypatch.setattr(core, "exchange", exchange_together)
        engines.append(LocalEngine(core))

    async def generate_on_both() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate([1], Sampling(max_tokens=1)) for engine in engines)
        )

    completions = asyncio.run(generate_on_both())
    assert [completion.token_ids for completion in completions] == [(9,), (9,)]


def test_a_step_that_breaks_fails_who_waits_and_nobody_later(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async def play() -> Completion:
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.decoder, "decode", fail)
            calls = [engine.generate([1, 2, number], Sampling(max_tokens=9)) for number in range(5)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert str(error) == "the engine failed: RuntimeError: out of memory"
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine._loop
        assert not engine.core.has_work
        return await engine.generate([1, 2, 3], Sampling(max_tokens=9))

    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    assert largest_logprob_error(model, [1, 2, 3], asyncio.run(play())) < LOGPROB_TOLERANCE


def test_a_deterministic_engine_gives_the_same_bits_in_any_batch(qwen2: Path) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 64, size).tolist() for size in (3, 17, 40, 5, 29)]
    same_prompt = prompts[1]
    same_prefix = [*prompts[2][:30], 1, 2]
    prompts += [same_prompt, same_prefix]

    def play(*batches: list[int], rows: int = 8) -> dict[int, Completion]:
        engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=rows, deterministic=True)
        completions: dict[int, Completion] = {}
        for batch in batches:
            for number in batch:
                engine.submit(number, prompts[number], Sampling(max_tokens=20, seed=number))
            completions |= drain(engine)
        return completions

    alone = play(*([number] for number in range(len(prompts))))
    together = play([0, 1, 2, 3, 4, 5, 6])
    in_two_batches = play([6, 2, 5], [4, 1, 0, 3])
    in_few_rows = play([5, 4, 3, 2, 1, 0, 6], rows=3)
    for other in (together, in_two_batches, in_few_rows):
        for number, completion in alone.items():
            assert other[number].token_ids == completion.token_ids
            assert other[number].logprobs == completion.logprobs
            # Only the last two prompts share tokens with others.
            assert other[number].cached_tokens <= 30


def test_a_token_is_sampled_by_seed_and_position(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [3, 1, 4, 1, 5]
    for number in (11, 2**64 - 1):
        engine.submit(number, prompt, Sampling(max_tokens=20, seed=number, temperature=0.8))
    for number, completion in drain(engine).items():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, 4:-1]
        cumulative = (logits.double() / 0.8).softmax(-1).cumsum(-1).numpy()
        uniform = uniforms(np.full(20, number, dtype=np.uint64), np.arange(20))
        expected = [
            int(np.searchsorted(sums, point))
            for sums, point in zip(cumulative, uniform, strict=True)
        ]
        assert completion.token_ids == tuple(expected)


def test_every_token_is_reported_once_across_a_weight_update(qwen2: Path) -> None:
    state = Qwen2ForCausalLM.from_pretrained(qwen2).state_dict()

    async def run() -> None:
        engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=160))
        parts: list[Sequence[int]] = []

        def note(position: int, token_ids: Sequence[int]) -> bool:
            assert position == sum(len(part) for part in parts)
            parts.append(token_ids)
            if len(parts) == 2:
                engine.core.load_weights(state.items(), 7)
            return True

        callback = TokenCallback(note, every=8)
        completion = await engine.stream([5, 6, 7], Sampling(max_tokens=36, seed=3), callback)
        assert [len(part) for part in parts] == [8, 8, 8, 8]
        assert tuple(itertools.chain(*parts)) == completion.token_ids[:32]
        assert spans(completion) == [(0, 0, 16), (7, 16, 36)]

    asyncio.run(run())


def sample_tokens(engine: EmbeddedEngine, seed: int) -> tuple[int, ...]:
    engine.submit(0, [9], Sampling(max_tokens=40, seed=seed))
    tokens: tuple[int, ...] = drain(engine)[0].token_ids
    return tokens


def test_each_request_has_its_own_stop_tokens(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    # Token 0 is among the sampled ones, so that padding of the stop tokens by 0 would be noticed.
    seed = next(seed for seed in range(20) if 0 in sample_tokens(engine, seed))
    sampling = Sampling(max_tokens=40, seed=seed)
    tokens = sample_tokens(engine, seed)
    stops = tuple(dict.fromkeys(tokens))[1:4]
    engine.submit(1, [9], replace(sampling, stop=stops))
    assert drain(engine)[1].token_ids == tokens[: tokens.index(stops[0]) + 1]

    # The stop tokens of request 1 do not stay in its row, which has room for three.
    for number in (2, 3):
        engine.submit(number, [9], replace(sampling, stop=(70,)))
    assert {completion.token_ids for completion in drain(engine).values()} == {tokens}

    # Request 6 has more stop tokens than fit so far.
    engine.submit(4, [9], sampling)
    engine.submit(5, [8], Sampling(max_tokens=4))
    run_steps(engine, 1)
    engine.submit(6, [9], replace(sampling, stop=(70, 71, 72, 73)))
    completions = drain(engine)
    assert completions[4].token_ids == tokens
    assert completions[6].token_ids == tokens


def test_sleep_frees_keys_and_keeps_weights(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [*range(30)]
    engine.submit(1, prompt, Sampling(max_tokens=20))
    engine.step()
    with pytest.raises(EngineError, match="cannot sleep while requests are running"):
        engine.sleep()
    engine.abort({1})
    # The outcome of the aborted request has not been returned yet.
    with pytest.raises(EngineError, match="cannot sleep"):
        engine.sleep()
    drain(engine)
    engine.sleep()
    engine.submit(2, prompt, Sampling(max_tokens=2))
    assert str(drain(engine)[2]) == "the engine sleeps; wake it first"
    engine.wake(("weights",))
    engine.submit(3, prompt, Sampling(max_tokens=2))
    assert isinstance(drain(engine)[3], EngineError)  # the KV cache still sleeps
    engine.wake()
    engine.submit(4, prompt, Sampling(max_tokens=9))
    completion = drain(engine)[4]
    assert completion.cached_tokens == 0
    assert largest_logprob_error(model, prompt, completion) < LOGPROB_TOLERANCE


def test_sleep_frees_the_cache_that_attention_was_planned_for(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    engine.submit(1, [5, 6, 7], Sampling(max_tokens=4))
    drain(engine)
    assert engine._cache is not None
    cache = weakref.ref(engine._cache)
    engine.sleep(("kv_cache",))
    assert cache() is None


def test_a_cancelled_call_takes_no_further_step(qwen2: Path) -> None:
    engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64))

    async def play() -> None:
        call = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=60)))
        while engine.core.stats.steps < 3:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await engine.idle()

    asyncio.run(play())
    assert engine.core.stats.steps in (3, 4)
    assert not engine.core.has_work
