"""The embedded engine's rows: whose keys are used again, and whose give way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion, Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, drain, worst

torch.set_num_threads(1)


def test_prefix_reuse_changes_nothing_but_the_work(qwen2: Path) -> None:
    rng = np.random.default_rng(3)
    system = rng.integers(0, 64, 20).tolist()
    members = [10 * group + sample for group in range(3) for sample in range(3)]
    seen: dict[bool, list[Completion]] = {}
    work = {}
    for reuse in (True, False):
        engine = EmbeddedEngine.from_folder(qwen2, max_length=200, rows=12, reuse_prefixes=reuse)
        history = {key: [*system, *range(key // 10, key // 10 + 20)] for key in members}
        seen[reuse] = []
        for turn in range(3):
            for key in members:
                engine.submit(
                    key, history[key], Sampling(max_tokens=3 + key % 7, seed=turn * 100 + key)
                )
            for key, completion in sorted(drain(engine).items()):
                seen[reuse].append(completion)
                history[key] = [*history[key], *completion.token_ids, 1, 2, 3]
        work[reuse] = engine.stats.prefill_tokens
    for reused, plain in zip(seen[True], seen[False], strict=True):
        assert reused.token_ids == plain.token_ids
        assert reused.logprobs == pytest.approx(plain.logprobs, abs=LOGPROB_TOLERANCE)
    # Turn 1: the system prompt once, each group's 20 tokens once. Turns 2 and 3: the last sampled token and 3 new ones.
    assert work[True] == 20 + 3 * 20 + 2 * 9 * 4
    assert work[False] > 9 * (40 + 45 + 55)


def converse(
    engine: EmbeddedEngine, number: int, prompt: list[int], new: int = 3
) -> tuple[Completion, list[int]]:
    """One completion, and the prompt of the turn after it."""
    engine.submit(number, prompt, Sampling(max_tokens=new, seed=number))
    completion = drain(engine)[number]
    return completion, [*prompt, *completion.token_ids, 63]


def test_what_was_used_longest_ago_gives_way(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    first, second = [1] * 10, [2] * 10
    for prompt, other in ((first, second), (second, first)):
        _, again = converse(engine, 0, prompt)
        converse(engine, 1, other)
        kept, last = converse(engine, 2, again)  # the older one is used once more
        assert kept.cached_tokens == 10 + 2
        converse(engine, 3, [3] * 10)  # takes the row of the other
        assert converse(engine, 4, last)[0].cached_tokens == len(last) - 2
        assert converse(engine, 5, [*other, 4])[0].cached_tokens == 0
        engine.load_weights(
            Qwen2ForCausalLM.from_pretrained(qwen2).state_dict().items(), 0
        )  # forget everything


def test_a_row_of_no_use_gives_way_first(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    engine.submit(0, [1, 2, 3], Sampling(max_tokens=20))
    engine.step()
    engine.load_weights(Qwen2ForCausalLM.from_pretrained(qwen2).state_dict().items(), 1)
    _, again = converse(
        engine, 1, [4] * 10
    )  # has ended when the other does, whose keys are of two versions
    assert not engine.has_work
    converse(engine, 2, [5] * 10)
    assert converse(engine, 3, again)[0].cached_tokens == 10 + 2


def test_a_longer_conversation_is_not_overwritten_by_one_that_begins_like_it(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=3)
    _, again = converse(engine, 0, [*range(10), *[20] * 10])
    assert converse(engine, 1, [*range(10), *[30] * 10])[0].cached_tokens == 10
    assert converse(engine, 2, again)[0].cached_tokens == 20 + 2


def test_a_twin_is_no_ones_source_before_it_has_its_keys(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=3)
    followed = [converse(engine, number, [number] * 20)[1] for number in range(3)]
    converse(engine, 3, followed[0])
    converse(engine, 4, followed[2])  # row 1 is now the oldest, then 0, then 2
    prompts = {
        5: [*range(40, 60)],
        6: [*range(40, 60)],
        7: [*range(40, 55), 1],
    }  # row 1, its twin in 0, a cousin in 2
    for number, prompt in prompts.items():
        engine.submit(number, prompt, Sampling(max_tokens=4))
    done = drain(engine)
    assert [done[number].cached_tokens for number in prompts] == [0, 20, 15]
    assert (
        max(worst(model, prompt, done[number]) for number, prompt in prompts.items())
        < LOGPROB_TOLERANCE
    )


def test_a_single_token_is_no_ones_prefix_until_it_has_keys(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [*range(20)]
    for number in range(3):  # one computes the prompt, the others copy it
        engine.submit(number, prompt, Sampling(max_tokens=1, seed=number))
    firsts = {number: one.token_ids for number, one in drain(engine).items()}
    assert len(set(firsts.values())) == 3
    for number, first in firsts.items():
        longer = [*prompt, *first, 1, 2]
        engine.submit(number, longer, Sampling(max_tokens=4))
        second = drain(engine)[number]
        assert second.cached_tokens == 20
        assert worst(model, longer, second) < LOGPROB_TOLERANCE


def test_a_cache_under_pressure_changes_no_log_probability(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    rng = np.random.default_rng(5)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=96, rows=4)
    talks = [[*range(12), *rng.integers(0, 64, rng.integers(0, 8)).tolist()] for _ in range(9)]
    reused = 0
    for turn in range(4):
        asked = {int(number): list(talks[number]) for number in rng.permutation(9)[:6]}
        for number, prompt in asked.items():
            engine.submit(number, prompt, Sampling(max_tokens=int(rng.integers(1, 9)), seed=turn))
        engine.step()
        engine.abort({next(iter(asked))})
        for number, completion in drain(engine).items():
            reused += completion.cached_tokens
            if completion.token_ids:
                assert worst(model, asked[number], completion) < LOGPROB_TOLERANCE
            talks[number] = [*talks[number], *completion.token_ids, turn]
    assert reused > 200
