"""Reuse of cached prefixes, and the choice of rows that new prompts overwrite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion, Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, drain, largest_logprob_error

torch.set_num_threads(1)


def play_chats(engine: EmbeddedEngine, turns: int = 3) -> list[Completion]:
    """Play three chats of each of three groups, whose prompts begin with one system prompt."""
    system = np.random.default_rng(3).integers(0, 64, 20).tolist()
    chats: dict[int, list[int]] = {}
    for group in range(3):
        for sample in range(3):
            chats[10 * group + sample] = [*system, *range(group, group + 20)]
    completions = []
    for turn in range(turns):
        for number, prompt in chats.items():
            sampling = Sampling(max_tokens=3 + number % 7, seed=100 * turn + number)
            engine.submit(number, prompt, sampling)
        for number, completion in sorted(drain(engine).items()):
            completions.append(completion)
            chats[number] = [*chats[number], *completion.token_ids, 1, 2, 3]
    return completions


def test_reuse_of_prefixes_changes_only_the_computed_tokens(qwen2: Path) -> None:
    reusing = EmbeddedEngine.from_folder(qwen2, max_length=200, rows=12)
    plain = EmbeddedEngine.from_folder(qwen2, max_length=200, rows=12, reuse_prefixes=False)
    for completion, expected in zip(play_chats(reusing), play_chats(plain), strict=True):
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
    # In the first turn, the system prompt and the 20 tokens of each group are computed once. In
    # both later turns, 4 tokens of each chat: the last sampled one and three new ones.
    assert reusing.stats.prefill_tokens == 20 + 3 * 20 + 2 * 9 * 4
    assert plain.stats.prefill_tokens > 9 * (40 + 45 + 55)


def take_turn(
    engine: EmbeddedEngine, number: int, prompt: list[int], max_tokens: int = 3
) -> tuple[Completion, list[int]]:
    """Return one completion, and the prompt of the next turn of its chat."""
    engine.submit(number, prompt, Sampling(max_tokens=max_tokens, seed=number))
    completion = drain(engine)[number]
    return completion, [*prompt, *completion.token_ids, 63]


def cached_tokens(engine: EmbeddedEngine, number: int, prompt: list[int]) -> int:
    """Return the number of tokens of a prompt whose keys were reused."""
    completion, _ = take_turn(engine, number, prompt)
    return completion.cached_tokens


@pytest.mark.parametrize(
    ("prompt", "other"), [([1] * 10, [2] * 10), ([2] * 10, [1] * 10)], ids=["1, 2", "2, 1"]
)
def test_the_least_recently_used_row_is_overwritten(
    qwen2: Path, prompt: list[int], other: list[int]
) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    _, next_turn = take_turn(engine, 0, prompt)
    take_turn(engine, 1, other)
    completion, last_turn = take_turn(engine, 2, next_turn)  # in the row of the first turn
    assert completion.cached_tokens == 10 + 2
    take_turn(engine, 3, [3] * 10)  # in the row of the other prompt
    assert cached_tokens(engine, 4, last_turn) == len(last_turn) - 2
    assert cached_tokens(engine, 5, [*other, 4]) == 0


def test_a_row_without_valid_keys_is_overwritten_first(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=2)
    engine.submit(0, [1, 2, 3], Sampling(max_tokens=20))
    engine.step()
    engine.load_weights(Qwen2ForCausalLM.from_pretrained(qwen2).state_dict().items(), 1)
    # Request 1 ends before request 0, whose keys are of two versions.
    _, next_turn = take_turn(engine, 1, [4] * 10)
    assert not engine.has_work
    take_turn(engine, 2, [5] * 10)
    assert cached_tokens(engine, 3, next_turn) == 10 + 2


def test_a_chat_is_not_overwritten_by_one_that_begins_like_it(qwen2: Path) -> None:
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=3)
    _, next_turn = take_turn(engine, 0, [*range(10), *[20] * 10])
    assert cached_tokens(engine, 1, [*range(10), *[30] * 10]) == 10
    assert cached_tokens(engine, 2, next_turn) == 20 + 2


def test_a_copied_prompt_is_no_source_before_it_has_its_keys(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64, rows=3)
    next_turns = [take_turn(engine, number, [number] * 20)[1] for number in range(3)]
    take_turn(engine, 3, next_turns[0])
    take_turn(engine, 4, next_turns[2])
    # Row 1 is the least recently used one now, then row 0, then row 2. So request 5 is computed in
    # row 1, request 6 is a copy of it in row 0, and request 7 in row 2 shares 15 tokens with both.
    prompts = {
        5: [*range(40, 60)],
        6: [*range(40, 60)],
        7: [*range(40, 55), 1],
    }
    for number, prompt in prompts.items():
        engine.submit(number, prompt, Sampling(max_tokens=4))
    completions = drain(engine)
    assert [completions[number].cached_tokens for number in prompts] == [0, 20, 15]
    for number, prompt in prompts.items():
        assert largest_logprob_error(model, prompt, completions[number]) < LOGPROB_TOLERANCE


def test_a_sampled_token_is_not_reused_before_it_has_keys(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=64)
    prompt = [*range(20)]
    for number in range(3):  # the prompt is computed in one row and copied to two others
        engine.submit(number, prompt, Sampling(max_tokens=1, seed=number))
    first_turns = drain(engine)
    assert len({completion.token_ids for completion in first_turns.values()}) == 3
    for number, completion in first_turns.items():
        next_prompt = [*prompt, *completion.token_ids, 1, 2]
        engine.submit(number, next_prompt, Sampling(max_tokens=4))
        next_completion = drain(engine)[number]
        assert next_completion.cached_tokens == 20
        assert largest_logprob_error(model, next_prompt, next_completion) < LOGPROB_TOLERANCE


def test_log_probabilities_are_right_with_fewer_rows_than_chats(qwen2: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen2)
    rng = np.random.default_rng(5)
    engine = EmbeddedEngine.from_folder(qwen2, max_length=96, rows=4)
    chats = [[*range(12), *rng.integers(0, 64, rng.integers(0, 8)).tolist()] for _ in range(9)]
    reused_tokens = 0
    for turn in range(4):
        prompts = {int(number): list(chats[number]) for number in rng.permutation(9)[:6]}
        for number, prompt in prompts.items():
            engine.submit(number, prompt, Sampling(max_tokens=int(rng.integers(1, 9)), seed=turn))
        engine.step()
        engine.abort({next(iter(prompts))})
        for number, completion in drain(engine).items():
            reused_tokens += completion.cached_tokens
            if completion.token_ids:
                assert largest_logprob_error(model, prompts[number], completion) < LOGPROB_TOLERANCE
            chats[number] = [*chats[number], *completion.token_ids, turn]
    assert reused_tokens > 200
