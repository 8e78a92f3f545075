"""Prompts that rows share are read once in a decoding pass, and give the same completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout.engines.embedded.attention import AttentionPlanner, GroupBlock, RowBlock
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.cache import DecodeBatch
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import parse_architecture
from rollout.records.trajectory import Sampling
from tests.support.embedded import (
    LOGPROB_TOLERANCE,
    SIZES,
    drain,
    largest_logprob_error,
    make_qwen2,
)

torch.set_num_threads(1)
# Lengths of prompts that have four replies each. To read one of them three times less is worth the
# cost of a group block.
LENGTHS = (220, 240, 210)


@pytest.fixture
def engine() -> EmbeddedEngine:
    model = make_qwen2(0)
    shape = parse_architecture(model.config.to_dict(), "a test's")
    decoder = CachedDecoder(shape, 400)
    decoder.load(model.state_dict().items())
    return EmbeddedEngine(decoder, rows=16)


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, SIZES["vocab_size"], length).tolist() for length in LENGTHS]


def next_batch(engine: EmbeddedEngine) -> DecodeBatch:
    """Return the rows of the engine's next decoding pass."""
    batch, _ = engine._rows.decode_batch(np.flatnonzero(engine._rows.live))
    return batch


def next_blocks(engine: EmbeddedEngine) -> list[tuple[str, int]]:
    """Return kind and number of rows of each attention block of the next decoding pass."""
    blocks = engine._attention.plan(next_batch(engine))
    return [(type(block).__name__, block.part.stop - block.part.start) for block in blocks]


def test_groups_of_unequal_length_are_one_block(engine: EmbeddedEngine) -> None:
    model = make_qwen2(0)
    long_prompts = prompts()
    for number in range(12):
        prompt = long_prompts[number // 4]
        sampling = Sampling(max_tokens=5 + 3 * (number % 4), seed=number)
        engine.submit(number, prompt, sampling)
    engine.step()
    assert next_blocks(engine) == [("GroupBlock", 12)]
    completions = drain(engine)  # as replies end, rows of the block become idle
    assert [len(completions[number].token_ids) for number in range(4)] == [5, 8, 11, 14]
    for number in range(12):
        assert (
            largest_logprob_error(model, long_prompts[number // 4], completions[number])
            < LOGPROB_TOLERANCE
        )


def test_interleaved_prompts_that_begin_alike_are_a_group_each(engine: EmbeddedEngine) -> None:
    model = make_qwen2(0)
    template = [7, 7, 7, 7, 7]  # first tokens of all chats
    chats = [[*template, *prompt] for prompt in prompts()]
    for number in range(12):
        engine.submit(number, chats[number % 3], Sampling(max_tokens=5, seed=number))
    engine.step()
    assert engine.stats.prefill_tokens == len(template) + sum(LENGTHS)
    assert engine._rows.shared[:12].tolist() == [225] * 4 + [245] * 4 + [215] * 4
    assert next_blocks(engine) == [("GroupBlock", 12)]
    completions = drain(engine)
    for number in range(12):
        assert (
            largest_logprob_error(model, chats[number % 3], completions[number]) < LOGPROB_TOLERANCE
        )


def test_prompts_that_share_most_tokens_are_one_group(engine: EmbeddedEngine) -> None:
    text, *_ = prompts()
    for number in range(8):  # two questions behind one text, four replies to each
        question = [number // 4, 1]
        engine.submit(number, [*text, *question], Sampling(max_tokens=4, seed=number))
    engine.step()
    assert len(set(engine._rows.group[:8].tolist())) == 1
    assert engine._rows.shared[:8].tolist() == [222] * 4 + [220] * 4
    assert next_blocks(engine) == [("GroupBlock", 8)]


def test_groups_with_equal_prefixes_are_one_block(engine: EmbeddedEngine) -> None:
    assert engine._cache is not None
    # Two groups of four rows share 220 tokens each. The longest prompt began the first group; the
    # second began with a prompt that is 160 tokens shorter, and its later prompts are as long.
    batch = DecodeBatch(
        rows=np.arange(8),
        positions=np.array([380, 222, 222, 222, 220, 380, 380, 380]),
        groups=np.array([16] * 4 + [20] * 4),  # they begin in rows 0 and 4 of the 16
        shared=np.array([380, 220, 220, 220] + [220] * 4),
        adapters=np.zeros(8, dtype=np.int64),
    )
    (block,) = AttentionPlanner(engine._cache).plan(batch)
    assert isinstance(block, GroupBlock)
    assert block.part == slice(0, 8)


def test_next_turns_still_share_the_first_prompt(engine: EmbeddedEngine) -> None:
    model = make_qwen2(0)
    first, other, _ = prompts()
    for number in range(4):
        engine.submit(number, first, Sampling(max_tokens=6, seed=number))
    replies = drain(engine)
    turns = [[*first, *replies[number].token_ids, 1, 2] for number in range(4)]
    for number in range(4):
        engine.submit(number, turns[number], Sampling(max_tokens=6, seed=9 + number))
    engine.submit(4, other, Sampling(max_tokens=6, seed=4))
    engine.step()
    assert next_blocks(engine) == [("GroupBlock", 4), ("RowBlock", 1)]
    completions = drain(engine)
    for number in range(4):
        assert largest_logprob_error(model, turns[number], completions[number]) < LOGPROB_TOLERANCE
    assert largest_logprob_error(model, other, completions[4]) < LOGPROB_TOLERANCE


def test_a_row_that_another_prompt_takes_leaves_the_group(engine: EmbeddedEngine) -> None:
    model = make_qwen2(0)
    first, other, _ = prompts()
    for number in range(16):  # every row of the cache
        max_tokens = 2 if number == 0 else 12
        engine.submit(number, first, Sampling(max_tokens=max_tokens, seed=number))
    engine.submit(16, other, Sampling(max_tokens=12, seed=16))

    def running_ids() -> list[int]:
        return [running.id for running in engine._rows.generations if running is not None]

    while 16 not in running_ids():
        engine.step()
    # The row in which the group began has another prompt now.
    assert int(engine._rows.group[0]) != int(engine._rows.group[1])
    assert ("GroupBlock", 15) in next_blocks(engine)
    completions = drain(engine)
    for number in range(1, 16):
        assert largest_logprob_error(model, first, completions[number]) < LOGPROB_TOLERANCE
    assert largest_logprob_error(model, other, completions[16]) < LOGPROB_TOLERANCE


def test_a_short_common_prompt_is_read_row_by_row(engine: EmbeddedEngine) -> None:
    for number in range(4):
        engine.submit(number, [1, 2, 3], Sampling(max_tokens=4, seed=number))
    engine.step()
    assert next_blocks(engine) == [("RowBlock", 4)]


def test_advanced_blocks_attend_as_new_ones_do(engine: EmbeddedEngine) -> None:
    long_prompts = prompts()
    for number in range(8):  # two groups, whose replies end one after another
        sampling = Sampling(max_tokens=6 + 5 * (number % 4), seed=number)
        engine.submit(number, long_prompts[number // 4], sampling)
    for number in range(8, 10):
        engine.submit(number, [1, 2, number], Sampling(max_tokens=40, seed=number))
    engine.step()
    cache = engine._cache
    assert cache is not None

    def attend(blocks: Sequence[RowBlock | GroupBlock], q: torch.Tensor) -> torch.Tensor:
        keys = cache.keys[0]
        values = cache.values[0]
        return torch.cat([block.attend(q[block.part], keys, values, 0) for block in blocks])

    generator = torch.Generator().manual_seed(0)
    advanced = 0
    while engine.has_work:
        batch = next_batch(engine)
        before = engine._attention.blocks
        engine.step()
        if engine._attention.blocks is before:
            advanced += 1
        q = torch.randn(len(batch.rows), SIZES["num_attention_heads"], 8, generator=generator)
        old = attend(engine._attention.blocks, q)
        new = attend(engine._attention.cut(batch), q)
        torch.testing.assert_close(old, new, rtol=0, atol=1e-6)
    assert advanced > 20, "most steps should continue with the blocks of the step before"
