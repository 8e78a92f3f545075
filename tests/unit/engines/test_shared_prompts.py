"""A prompt that rows share is read once in a decoding pass, and completions are those of every row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import architecture_of
from rollout.records.trajectory import Sampling
from tests.support.embedded import LOGPROB_TOLERANCE, SIZES, drain, make_qwen2, worst

torch.set_num_threads(1)
LENGTHS = (
    220,
    240,
    210,
)  # of prompts, four replies to each: reading one 3 times less is worth a block of groups


@pytest.fixture
def engine() -> EmbeddedEngine:
    model = make_qwen2(0)
    shape = architecture_of(model.config.to_dict(), "a test's")
    decoder = CachedDecoder(shape, 400)
    decoder.load(model.state_dict().items())
    return EmbeddedEngine(decoder, rows=16)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, SIZES["vocab_size"], length).tolist() for length in LENGTHS]


def blocks(engine: EmbeddedEngine) -> list[tuple[str, int]]:
    """(Kind, rows) of what attends together in the next pass."""
    batch, _ = engine._rows.decode_batch(np.flatnonzero(engine._rows.live))
    found = engine._attention.plan(batch)
    return [(type(block).__name__, block.part.stop - block.part.start) for block in found]


def test_ragged_groups_are_one_block_and_match_hugging_face(engine: EmbeddedEngine) -> None:
    model, asked = make_qwen2(0), prompts()
    for number in range(12):
        engine.submit(
            number, asked[number // 4], Sampling(max_tokens=5 + 3 * (number % 4), seed=number)
        )
    engine.step()
    assert blocks(engine) == [("GroupBlock", 12)]
    done = drain(engine)  # as replies end, rows of the block are idle
    assert [len(done[number].token_ids) for number in range(4)] == [5, 8, 11, 14]
    assert max(worst(model, asked[n // 4], done[n]) for n in range(12)) < LOGPROB_TOLERANCE


def test_prompts_that_begin_alike_and_come_mixed_up_are_a_group_each(
    engine: EmbeddedEngine,
) -> None:
    model, asked = (
        make_qwen2(0),
        [[7, 7, 7, 7, 7, *prompt] for prompt in prompts()],
    )  # a template's first tokens
    for number in range(12):
        engine.submit(number, asked[number % 3], Sampling(max_tokens=5, seed=number))
    engine.step()
    assert engine.stats.prefill_tokens == 5 + sum(LENGTHS)
    assert engine._rows.shared[:12].tolist() == [225] * 4 + [245] * 4 + [215] * 4
    assert blocks(engine) == [("GroupBlock", 12)]
    done = drain(engine)
    assert max(worst(model, asked[n % 3], done[n]) for n in range(12)) < LOGPROB_TOLERANCE


def test_prompts_that_share_most_are_one_group(engine: EmbeddedEngine) -> None:
    long, *_ = prompts()
    for number in range(8):  # two questions behind one text, four replies to each
        engine.submit(number, [*long, number // 4, 1], Sampling(max_tokens=4, seed=number))
    engine.step()
    assert len({*engine._rows.group[:8].tolist()}) == 1
    assert engine._rows.shared[:8].tolist() == [222] * 4 + [220] * 4
    assert blocks(engine) == [("GroupBlock", 8)]


def test_the_next_turns_share_the_first_prompt_still(engine: EmbeddedEngine) -> None:
    model, (first, other, _) = make_qwen2(0), prompts()
    for number in range(4):
        engine.submit(number, first, Sampling(max_tokens=6, seed=number))
    said = drain(engine)
    turns = [[*first, *said[number].token_ids, 1, 2] for number in range(4)]
    for number in range(4):
        engine.submit(number, turns[number], Sampling(max_tokens=6, seed=9 + number))
    engine.submit(4, other, Sampling(max_tokens=6, seed=4))
    engine.step()
    assert blocks(engine) == [("GroupBlock", 4), ("RowBlock", 1)]
    done = drain(engine)
    assert max(worst(model, turns[n], done[n]) for n in range(4)) < LOGPROB_TOLERANCE
    assert worst(model, other, done[4]) < LOGPROB_TOLERANCE


def test_a_row_taken_by_another_prompt_leaves_the_group(engine: EmbeddedEngine) -> None:
    model, (first, other, _) = make_qwen2(0), prompts()
    for number in range(16):  # every row of the cache
        engine.submit(number, first, Sampling(max_tokens=2 if number == 0 else 12, seed=number))
    engine.submit(16, other, Sampling(max_tokens=12, seed=16))
    while not any(running is not None and running.id == 16 for running in engine._rows.generations):
        engine.step()
    assert int(engine._rows.group[0]) != int(engine._rows.group[1]), (
        "the group's first row is another's now"
    )
    assert ("GroupBlock", 15) in blocks(engine)
    done = drain(engine)
    assert max(worst(model, first, done[n]) for n in range(1, 16)) < LOGPROB_TOLERANCE
    assert worst(model, other, done[16]) < LOGPROB_TOLERANCE


def test_a_short_prompt_is_not_worth_it(engine: EmbeddedEngine) -> None:
    for number in range(4):
        engine.submit(number, [1, 2, 3], Sampling(max_tokens=4, seed=number))
    engine.step()
    assert blocks(engine) == [("RowBlock", 4)]


def test_blocks_that_go_on_see_what_new_ones_see(engine: EmbeddedEngine) -> None:
    asked = prompts()
    for number in range(8):  # two groups, of which replies end one after another
        engine.submit(
            number, asked[number // 4], Sampling(max_tokens=6 + 5 * (number % 4), seed=number)
        )
    for number in range(8, 10):
        engine.submit(number, [1, 2, number], Sampling(max_tokens=40, seed=number))
    engine.step()
    cache, draw, kept = engine._cache, torch.Generator().manual_seed(0), 0
    assert cache is not None
    while engine.has_work:
        batch, _ = engine._rows.decode_batch(np.flatnonzero(engine._rows.live))
        before = engine._attention.blocks
        engine.step()
        kept += engine._attention.blocks is before
        q = torch.randn(len(batch.rows), SIZES["num_attention_heads"], 8, generator=draw)
        old, new = (
            torch.cat(
                [block.attend(q[block.part], cache.keys[0], cache.values[0], 0) for block in found]
            )
            for found in (engine._attention.blocks, engine._attention.cut(batch))
        )
        torch.testing.assert_close(old, new, rtol=0, atol=1e-6)
    assert kept > 20, "most steps go on with what the last one had"
