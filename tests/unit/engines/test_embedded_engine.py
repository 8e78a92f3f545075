"""The embedded engine's scheduling, updates, aborts, seeds and sleep, step by step."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
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
from rollout.engines.embedded.local import LocalEngine, LocalReplicas
from rollout.engines.embedded.requests import Report, Request
from rollout.engines.embedded.sampling import uniforms
from rollout.records.trajectory import Completion, Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, drain, make_qwen2, steps, worst

torch.set_num_threads(1)


def test_requests_wait_for_a_row(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    for i in range(5):
        engine.submit(i, [i, i + 1], Sampling(max_tokens=4, seed=i))
    assert (
        engine.step() == []
    )  # the first token comes with the prompt, the second with the first decoding pass
    assert engine.stats.decode_tokens == 4
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert engine.stats.steps == 9  # three waves of three passes
    assert not engine.has_work


@pytest.mark.parametrize(
    ("called", "stream", "steps_taken"),
    [
        (None, 0, 10),  # whoever asks cannot call: five times the budget of 2 s
        ([0], 0, 30),  # nothing new: 15 times
        ([0], 16, 30),  # who hears of 16 tokens at a time can wait for them too
        ([1], 0, 2),
        ([0], 1, 2),  # every token is heard
    ],
)
def test_an_exchange_takes_as_long_as_nobody_wants_it_back(
    qwen2: Path,
    monkeypatch: pytest.MonkeyPatch,
    called: list[int] | None,
    stream: int,
    steps_taken: int,
) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    engine.interrupt = None if called is None else np.array(called)
    seconds = itertools.count()  # one for each step
    monkeypatch.setattr(
        batching,
        "time",
        SimpleNamespace(monotonic=lambda: next(seconds), thread_time=time.thread_time),
    )
    request = Request(
        id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=60), notify_every=stream
    )
    engine.exchange([request], [], 2.0)
    assert engine.stats.steps == steps_taken


def test_update_in_the_middle_gives_two_spans_and_keeps_old_keys(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, version=3)
    other = make_qwen2(5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.submit(1, prompt, Sampling(max_tokens=10))
    steps(engine, 3)  # 4 tokens
    engine.load_weights(other.state_dict().items(), 4)
    engine.load_weights(other.state_dict().items(), 5)  # no token was sampled by version 4
    completion = drain(engine)[1]
    assert [(span.version, span.start, span.end) for span in completion.versions] == [
        (3, 0, 4),
        (5, 4, 10),
    ]
    engine.submit(2, [*prompt, *completion.token_ids], Sampling(max_tokens=10))
    after = drain(engine)[2]
    assert after.cached_tokens == 0  # what ran across the update is no one's prefix
    assert worst(other, [*prompt, *completion.token_ids], after) < LOGPROB_TOLERANCE


def test_after_an_update_new_weights_read_old_keys(qwen2: Path) -> None:
    old = Qwen2ForCausalLM.from_pretrained(qwen2)
    new = make_qwen2(5)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [1, 2, 3, 4, 5]
    engine.submit(1, prompt, Sampling(max_tokens=9))
    steps(engine, 2)  # 3 tokens, the last without keys
    engine.load_weights(new.state_dict().items(), 1)
    completion = drain(engine)[1]
    assert [(span.version, span.start, span.end) for span in completion.versions] == [
        (0, 0, 3),
        (1, 3, 9),
    ]
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        before = old(ids[:, : 5 + 2], use_cache=True)
        after = new(ids[:, 5 + 2 : -1], past_key_values=before.past_key_values).logits[0]
    logits = torch.cat([before.logits[0, 4:], after])
    right = logits.log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert completion.logprobs == pytest.approx(right.tolist(), abs=LOGPROB_TOLERANCE)
    with torch.no_grad():
        alone = new(ids).logits[0, 4:-1].log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert (
        alone - right
    ).abs().min() > 1e-3  # no token would be taken for one of the other version


def test_abort(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=1)
    running, waiting, later, unknown = 1, 2, 3, 4
    engine.submit(running, [1, 2], Sampling(max_tokens=20))
    engine.submit(waiting, [1, 2], Sampling(max_tokens=20))
    engine.submit(later, [1, 2], Sampling(max_tokens=2))
    steps(engine, 2)
    engine.abort({running, waiting, unknown})
    done = drain(engine)
    assert {key: (one.finish_reason, len(one.token_ids)) for key, one in done.items()} == {
        running: ("abort", 3),
        waiting: ("abort", 0),
        later: ("length", 2),
    }
    assert done[waiting].versions[-1].version == 0


def test_aborts_in_a_full_house_let_the_waiting_in(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    for number in range(6):
        engine.submit(number, [number] * (50 if number == 2 else 3), Sampling(max_tokens=14))
    steps(engine, 3)
    engine.abort({0, 1, 3})
    done = dict(engine.step())
    assert {number: (one.finish_reason, len(one.token_ids)) for number, one in done.items()} == {
        0: ("abort", 4),
        1: ("abort", 4),
        3: ("abort", 0),
    }
    engine.abort({0, 1, 3})  # long gone
    engine.submit(6, [6], Sampling(max_tokens=1))  # came after the long prompt
    order = []
    while engine.has_work:
        order += [number for number, _ in engine.step()]
    assert order == [
        2,
        4,
        6,
        5,
    ]  # in the order of their coming, whatever their length: 5 and 6 waited for 2 and 4


def test_broken_weights_are_an_error_not_a_crash(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    state = dict(model.state_dict())
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, [1, 2], Sampling(max_tokens=4, top_p=0.9))
    with pytest.raises(EngineError, match="weights version 8 give logits that are not finite"):
        raise drain(engine)[1]
    engine.load_weights(state.items(), 9)
    engine.submit(1, [1, 2], Sampling(max_tokens=4))
    assert worst(model, [1, 2], drain(engine)[1]) < LOGPROB_TOLERANCE


def test_what_broken_weights_left_in_a_row_harms_no_one(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    state = dict(model.state_dict())
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, list(range(30)), Sampling(max_tokens=4))
    assert isinstance(drain(engine)[1], EngineError)
    engine.load_weights(state.items(), 9)
    prompts = {
        1: [1, 2],
        2: list(range(40, 60)),
    }  # side by side, the first is as wide as the second
    for key, prompt in prompts.items():
        engine.submit(key, prompt, Sampling(max_tokens=4))
    done = drain(engine)
    assert (
        max(worst(model, prompt, done[key]) for key, prompt in prompts.items()) < LOGPROB_TOLERANCE
    )


def test_copies_of_an_engine_share_the_work_and_a_prompt_goes_where_it_is(qwen2: Path) -> None:
    """As on several GPUs: a reply is the same wherever it is sampled, and the model is in the host's memory once."""
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

    async def play(
        engine: LocalEngine | LocalReplicas,
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        asked = [
            engine.generate(prompt, Sampling(max_tokens=4, seed=n))
            for n, prompt in enumerate(prompts)
        ]
        return [(said.token_ids, said.logprobs) for said in await asyncio.gather(*asked)]

    assert asyncio.run(play(engine)) == asyncio.run(play(alone))
    # each of the two prompts was computed once by the one that has it
    assert [own.core.stats.prefill_tokens for own in engine.engines] == [3, 3]


def test_engines_on_gpus_work_at_the_same_time(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, both = (
        [LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)) for _ in range(2)],
        threading.Barrier(2, timeout=20),
    )
    for engine in engines:
        monkeypatch.setattr(
            engine.core.decoder, "device", torch.device("meta")
        )  # no CPU; nothing is computed

        def exchange(requests: list[Request], aborts: list[int]) -> list[Report]:
            both.wait()
            reply = Completion(token_ids=(9,), logprobs=(0.0,), finish_reason="stop", versions=())
            return [(request.id, reply) for request in requests]

        monkeypatch.setattr(engine.core, "exchange", exchange)

    async def play() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate([1], Sampling(max_tokens=1)) for engine in engines)
        )

    assert [said.token_ids for said in asyncio.run(play())] == [(9,), (9,)]


def test_a_step_that_breaks_fails_who_waits_and_nobody_later(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2))

    def breaks(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async def play() -> Completion:
        with monkeypatch.context() as broken:
            broken.setattr(engine.core.decoder, "decode", breaks)
            asked = [engine.generate([1, 2, number], Sampling(max_tokens=9)) for number in range(5)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert str(error) == "the engine failed: RuntimeError: out of memory"
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine._loop
        assert not engine.core.has_work
        return await engine.generate([1, 2, 3], Sampling(max_tokens=9))

    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    assert worst(model, [1, 2, 3], asyncio.run(play())) < LOGPROB_TOLERANCE


def test_a_deterministic_engine_gives_the_same_bits_whatever_runs_beside(qwen2: Path) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 64, size).tolist() for size in (3, 17, 40, 5, 29)]
    prompts += [prompts[1], [*prompts[2][:30], 1, 2]]  # one again, and one that shares a prefix

    def play(*batches: list[int], rows: int = 8) -> dict[int, Completion]:
        engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=rows, deterministic=True)
        done: dict[int, Completion] = {}
        for batch in batches:
            for number in batch:
                engine.submit(number, prompts[number], Sampling(max_tokens=20, seed=number))
            done |= drain(engine)
        return done

    alone = play(*([number] for number in range(len(prompts))))
    for other in (
        play([0, 1, 2, 3, 4, 5, 6]),
        play([6, 2, 5], [4, 1, 0, 3]),
        play([5, 4, 3, 2, 1, 0, 6], rows=3),
    ):
        for number, completion in alone.items():
            assert other[number].token_ids == completion.token_ids
            assert other[number].logprobs == completion.logprobs  # not a bit apart
            assert other[number].cached_tokens <= 30  # what the last two have of others


def test_a_token_is_drawn_by_its_seed_and_its_place_in_the_completion(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [3, 1, 4, 1, 5]
    for number in (11, 2**64 - 1):
        engine.submit(number, prompt, Sampling(max_tokens=20, seed=number, temperature=0.8))
    for number, completion in drain(engine).items():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, 4:-1]
        below = (logits.double() / 0.8).softmax(-1).cumsum(-1).numpy()
        draws = uniforms(np.full(20, number, dtype=np.uint64), np.arange(20))
        assert completion.token_ids == tuple(
            int(np.searchsorted(row, u)) for row, u in zip(below, draws, strict=True)
        )


def test_every_token_of_a_reply_is_told_once_whatever_weights_sampled_it(qwen2: Path) -> None:
    async def run() -> None:
        engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=160))
        parts: list[Sequence[int]] = []

        def note(position: int, token_ids: Sequence[int]) -> bool:
            assert position == sum(len(part) for part in parts)
            parts.append(token_ids)
            if len(parts) == 2:  # after so many tokens
                engine.core.load_weights(
                    list(Qwen2ForCausalLM.from_pretrained(qwen2).state_dict().items()), 7
                )
            return True

        hear = TokenCallback(note, every=8)
        whole = await engine.stream([5, 6, 7], Sampling(max_tokens=36, seed=3), hear)
        assert [len(part) for part in parts] == [8, 8, 8, 8]
        assert tuple(itertools.chain(*parts)) == whole.token_ids[:32]
        assert [(span.version, span.start, span.end) for span in whole.versions] == [
            (0, 0, 16),
            (7, 16, 36),
        ]

    asyncio.run(run())


def test_stop_tokens_are_a_requests_own(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    free = Sampling(max_tokens=40, seed=next(seed for seed in range(20) if 0 in said(engine, seed)))
    tokens = said(engine, free.seed)
    stops = tuple(dict.fromkeys(tokens))[1:4]
    engine.submit(1, [9], replace(free, stop=stops))
    assert drain(engine)[1].token_ids == tokens[: tokens.index(stops[0]) + 1]
    for number in (2, 3):  # also in the row that it had
        engine.submit(number, [9], replace(free, stop=(70,)))  # one where there is room for three
    assert {one.token_ids for one in drain(engine).values()} == {tokens}
    engine.submit(4, [9], free)
    engine.submit(5, [8], Sampling(max_tokens=4))
    steps(engine, 1)
    engine.submit(
        6, [9], replace(free, stop=(70, 71, 72, 73))
    )  # there is room made for four; 0 is among the tokens
    done = drain(engine)
    assert done[4].token_ids == done[6].token_ids == tokens


def said(engine: EmbeddedEngine, seed: int) -> tuple[int, ...]:
    engine.submit(0, [9], Sampling(max_tokens=40, seed=seed))
    tokens: tuple[int, ...] = drain(engine)[0].token_ids
    return tokens


def test_sleep_forgets_keys_and_keeps_weights(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [*range(30)]
    engine.submit(1, prompt, Sampling(max_tokens=20))
    engine.step()
    with pytest.raises(EngineError, match="cannot sleep while requests are running"):
        engine.sleep()
    engine.abort({1})
    with pytest.raises(EngineError, match="cannot sleep"):  # what was aborted has not been told
        engine.sleep()
    drain(engine)
    engine.sleep()
    engine.submit(2, prompt, Sampling(max_tokens=2))
    assert str(drain(engine)[2]) == "the engine sleeps; wake it first"
    engine.wake(("weights",))
    engine.submit(3, prompt, Sampling(max_tokens=2))
    assert isinstance(drain(engine)[3], EngineError)  # there is no room for keys yet
    engine.wake()
    engine.submit(4, prompt, Sampling(max_tokens=9))
    completion = drain(engine)[4]
    assert completion.cached_tokens == 0
    assert worst(model, prompt, completion) < LOGPROB_TOLERANCE


def test_a_cancelled_call_takes_no_further_step(qwen2: Path) -> None:
    engine = LocalEngine(EmbeddedEngine.from_folder(qwen2, max_length=64))

    async def play() -> None:
        gone = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=60)))
        while engine.core.stats.steps < 3:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await engine._loop

    asyncio.run(play())
    assert engine.core.stats.steps in (3, 4)
    assert not engine.core.has_work
