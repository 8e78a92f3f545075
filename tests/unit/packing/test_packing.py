"""Packing stores what sequences begin with once and keeps every token's place, target and weight."""

import math
from dataclasses import fields, replace

import pytest
import torch

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel, Microbatch, Segment
from mcore_mas.packing.pack import PackedSamples, pack, tokens_saved, unpack

PROMPT = tuple(range(10, 20))


def sample(
    agent: str, prompt: tuple[int, ...], reply: tuple[int, ...], advantage: float = 1.0
) -> Sample:
    return Sample(
        policy="p",
        agent=agent,
        task="t",
        trajectory="x",
        turn=0,
        prompt_ids=prompt,
        completion_ids=reply,
        behaviour=tuple(-float(token) for token in reply),
        advantages=(advantage,) * len(reply),
        weight=advantage / 10,
    )


def test_a_shared_prompt_is_stored_once_and_last_tokens_not_at_all() -> None:
    (batch,) = pack([sample("a", PROMPT, (4, 5, 6), 1.0), sample("a", PROMPT, (7, 8), 2.0)], 100)
    assert batch.segments == (
        Segment(tokens=10),
        Segment(tokens=2, parent=0),
        Segment(tokens=1, parent=0),
    )
    assert batch.token_ids.tolist() == [*PROMPT, 4, 5, 7]
    assert batch.position_ids.tolist() == [*range(10), 10, 11, 10]
    assert batch.predictors.tolist() == [
        9,
        10,
        11,
        9,
        12,
    ]  # the prompt's last token predicts both first tokens
    assert batch.labels.tolist() == [4, 5, 6, 7, 8]
    assert batch.behaviour.tolist() == [-4.0, -5.0, -6.0, -7.0, -8.0]
    assert batch.advantages.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert batch.sequences.tolist() == [0, 0, 0, 1, 1]
    assert batch.unshared == 12 + 11
    assert tokens_saved([batch]) == 1 - 13 / 23


def test_a_turn_that_goes_on_from_another_is_the_same_sequence() -> None:
    first = sample("a", (1, 2), (3, 4))
    second = sample("a", (1, 2, 3, 4, 5), (6, 7))  # repeats the first turn, and an observation
    (batch,) = pack([second, first], 100)
    assert batch.segments == (Segment(tokens=6),)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    rows = set(
        zip(batch.sequences.tolist(), batch.predictors.tolist(), batch.labels.tolist(), strict=True)
    )
    assert rows == {(0, 4, 6), (0, 5, 7), (1, 1, 3), (1, 2, 4)}


def test_equal_samples_are_rows_of_the_same_tokens() -> None:
    (batch,) = pack([sample("a", (1, 2), (3, 4), 1.0), sample("a", (1, 2), (3, 4), -1.0)], 100)
    assert batch.token_ids.tolist() == [1, 2, 3]
    assert batch.predictors.tolist() == [1, 2, 1, 2]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_what_predicts_no_trained_token_is_left_out() -> None:
    untrained = replace(sample("a", (9, 9), (3,)), trained=(False,))
    tail = replace(sample("a", (1, 2), (3, 4, 5)), trained=(True, False, False))
    (batch,) = pack([untrained, tail, sample("a", (8,), ())], 100)
    assert (batch.token_ids.tolist(), batch.labels.tolist(), batch.sequences.tolist()) == (
        [1, 2],
        [3],
        [1],
    )
    assert pack([untrained], 100) == []
    assert unpack([], [], [sample("a", (8,), ())]) == [()]


def test_a_first_token_has_nothing_to_be_predicted_by() -> None:
    with pytest.raises(
        ValueError, match=r"trajectory x, turn 0 \(a\): the first token of the sequence is trained"
    ):
        pack([sample("a", (), (1, 2))], 100)


def test_a_microbatch_holds_one_agent_and_no_more_than_its_budget() -> None:
    replies = [(1, 1, 1), (2, 2, 2, 2), (3, 3), (4,) * 9]
    samples = [sample("b", (1, 2), (3,)), *(sample("a", PROMPT, reply) for reply in replies)]
    batches = pack(samples, 15)
    assert [b.agent for b in batches] == ["a", "a", "a", "b"]
    stem = Segment(tokens=10)
    assert [b.segments for b in batches[:3]] == [
        (Segment(tokens=18),),  # longer than the budget by itself
        (stem, Segment(tokens=2, parent=0), Segment(tokens=3, parent=0)),
        (Segment(tokens=11),),
    ]
    assert sum(len(b.labels) for b in batches) == 19


def test_the_largest_goes_first_where_there_is_room() -> None:
    samples = [sample("a", (n,) * n, (0,)) for n in (3, 6, 4, 7)]
    # 7 + 3, then 6 + 4
    assert [sorted(s.tokens for s in b.segments) for b in pack(samples, 10)] == [[3, 7], [4, 6]]


def test_no_rank_is_left_without_work() -> None:
    tree = [sample("a", PROMPT, (token,) * 5) for token in (1, 2, 3, 4)]
    assert len(pack(tree, 100)) == 1
    one, two = pack(tree, 100, CostModel(dp=2))  # the stem is stored twice
    assert [len(b.token_ids) for b in (one, two)] == [18, 18]
    assert sorted(one.sequences.unique().tolist() + two.sequences.unique().tolist()) == [0, 1, 2, 3]
    # three ranks: one has two of the replies
    assert sorted(len(b.token_ids) for b in pack(tree, 100, CostModel(dp=3))) == [14, 14, 18]
    # a single sequence cannot be cut
    assert len(pack(tree[:1], 100, CostModel(dp=2))) == 1


def test_a_pipeline_gets_more_micro_batches_while_that_is_faster() -> None:
    loose = [sample("a", (token,) * 20, (0,)) for token in (1, 2, 3, 4)]
    # of two stages: 80 + 80 in one, 80 + 40 in two, 80 + 20 in four
    assert [len(b.token_ids) for b in pack(loose, 100, CostModel(pp=2))] == [20] * 4
    stem = tuple(range(1000))
    tree = [sample("a", stem, (token,) * 3) for token in (1, 2)]
    # one of 1004 takes 1004, two of 1002 would take 1503
    assert len(pack(tree, 2000, CostModel(pp=2))) == 1


def test_packing_does_not_depend_on_the_order_of_samples() -> None:
    samples = [sample("a", PROMPT, (i, i % 3, 7)) for i in range(9)] + [
        sample("a", (5, i), (i,) * i) for i in range(9)
    ]
    ahead, back = (pack(order, 40, CostModel(dp=2)) for order in (samples, samples[::-1]))
    assert [b.segments for b in ahead] == [b.segments for b in back]
    assert [b.token_ids.tolist() for b in ahead] == [b.token_ids.tolist() for b in back]


def test_apart_every_sample_is_stored_by_itself() -> None:
    samples = [sample("a", PROMPT, (4, 5)), sample("a", PROMPT, (6, 7))]
    (batch,) = pack(samples, 100, share=False)
    assert batch.segments == (Segment(tokens=11), Segment(tokens=11))
    assert tokens_saved([batch]) == 0.0


def test_rows_find_their_way_back_to_their_samples() -> None:
    samples = [
        sample("b", (1, 2), (3,)),
        sample("a", PROMPT, (3, 4)),
        sample("a", PROMPT, (5, 6, 7)),
    ]
    samples[2] = replace(samples[2], trained=(True, False, True))
    batches = pack(samples, 100)
    rows = [batch.labels.float() for batch in batches]
    back = unpack(batches, rows, samples)
    assert back[:2] == [(3.0,), (3.0, 4.0)]
    assert back[2][::2] == (5.0, 7.0)
    assert math.isnan(back[2][1])


def turns() -> list[Sample]:
    """Three replies to a prompt of ten tokens, and one to another prompt."""
    prompts = [PROMPT, PROMPT, PROMPT, (50, 51, 52)]
    return [
        replace(sample("a", prompt, (4 + i, 5, 6)), turn=i, advantages=None, weight=1.0)
        for i, prompt in enumerate(prompts)
    ]


def same(one: Microbatch, other: Microbatch) -> bool:
    """To the bit, and NaN like NaN."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return all(
        torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0))
        if isinstance(a, torch.Tensor)
        else a == b
        for a, b in pairs
    )


def test_what_is_found_out_later_becomes_columns_of_the_same_places() -> None:
    samples = turns()
    packs = PackedSamples(samples, 100)
    (laid,) = packs.microbatches
    reference = [torch.arange(len(laid.labels), dtype=torch.float32)]
    rows = packs.unpack(reference)
    credited = [
        replace(s, reference=row, advantages=(float(i),) * 3, weight=0.5 + i)
        for i, (s, row) in enumerate(zip(samples, rows, strict=True))
    ]
    (batch,) = packs.training_microbatches(credited[::-1])  # in any order
    (anew,) = pack(credited, 100)
    assert same(batch, anew)
    assert batch.reference is not None and torch.equal(batch.reference, reference[0])
    assert batch.token_ids is laid.token_ids  # nothing is packed again


def test_what_is_not_trained_gives_its_segments_up() -> None:
    packs = PackedSamples(turns(), 100)
    (laid,) = packs.microbatches
    assert [segment.tokens for segment in laid.segments] == [10, 2, 2, 2, 5]
    (batch,) = packs.training_microbatches([turns()[1]])
    assert batch.segments == (Segment(tokens=10), Segment(tokens=2, parent=0))
    assert batch.token_ids.tolist() == [*PROMPT, 5, 5]
    assert batch.position_ids.tolist() == list(range(12))
    assert batch.predictors.tolist() == [9, 10, 11]
    assert batch.labels.tolist() == [5, 5, 6]
    assert batch.unshared == 12
    assert packs.training_microbatches([]) == []


def test_what_nobody_scores_is_packed_without_what_is_not_trained() -> None:
    samples = turns()
    (batch,) = PackedSamples(samples, 100).training_microbatches(samples[3:])
    (alone,) = pack(samples[3:], 100)
    assert same(batch, alone)


def test_the_experts_of_a_shared_token_are_those_of_the_first_sequence() -> None:
    """Two bytes for each token: of the prompt both samples know them, of the third sample nobody does."""
    first = replace(sample("a", PROMPT, (4, 5, 6)), routing=bytes(range(24)))
    second = replace(sample("a", PROMPT, (7, 8)), routing=bytes([99] * 22))
    (batch,) = pack([second, first, sample("a", (1,), (2, 3))], 100)
    assert batch.token_ids.tolist() == [*PROMPT, 4, 5, 7, 1, 2]
    assert batch.routing is not None
    known = [[2 * i, 2 * i + 1] for i in range(12)]
    assert batch.routing.tolist() == [*known, [99, 99], [255, 255], [255, 255]]
    assert pack([sample("a", PROMPT, (4, 5))], 100)[0].routing is None
    # what goes with tokens, and what is added for ranks that wait
    assert batch.padded(17).routing[12:].tolist() == [[99, 99]] + [[255, 255]] * 4
    assert batch.idle().routing.tolist() == [[255, 255]]
    part, _ = batch.padded(16).context_parallel_part(2, 1)
    assert part.routing.tolist() == batch.padded(16).routing[8:].tolist()
    kept = batch.select(batch.sequences == 1)  # of `first`
    assert (
        kept.token_ids.tolist() == [*PROMPT, 4, 5]
        and kept.routing.tolist() == batch.routing[:12].tolist()
    )
