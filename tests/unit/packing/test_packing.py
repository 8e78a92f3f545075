"""Packing of samples to micro-batches: common prefixes are stored once; positions, labels and weights are kept."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel, Microbatch, Segment
from mcore_mas.packing.pack import PackedSamples, pack, saved_token_share, unpack

PROMPT = tuple(range(10, 20))


def sample(
    agent: str, prompt: tuple[int, ...], reply: tuple[int, ...], advantage: float = 1.0
) -> Sample:
    """Return a sample whose log-probabilities are its negative token ids."""
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


def test_a_shared_prompt_is_stored_once_and_last_tokens_are_not_stored() -> None:
    (batch,) = pack([sample("a", PROMPT, (4, 5, 6), 1.0), sample("a", PROMPT, (7, 8), 2.0)], 100)
    assert batch.segments == (
        Segment(tokens=10),
        Segment(tokens=2, parent=0),
        Segment(tokens=1, parent=0),
    )
    assert batch.token_ids.tolist() == [*PROMPT, 4, 5, 7]
    assert batch.position_ids.tolist() == [*range(10), 10, 11, 10]
    # The last token of the prompt (9) predicts the first tokens of both replies.
    assert batch.predictors.tolist() == [9, 10, 11, 9, 12]
    assert batch.labels.tolist() == [4, 5, 6, 7, 8]
    assert batch.behaviour.tolist() == [-4.0, -5.0, -6.0, -7.0, -8.0]
    assert batch.advantages.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert batch.sequences.tolist() == [0, 0, 0, 1, 1]
    assert batch.tokens_without_sharing == 12 + 11
    assert saved_token_share([batch]) == 1 - 13 / 23


def test_a_turn_that_continues_another_is_in_the_same_sequence() -> None:
    first = sample("a", (1, 2), (3, 4))
    # The prompt repeats the first turn and has an observation.
    second = sample("a", (1, 2, 3, 4, 5), (6, 7))
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


def test_tokens_that_predict_no_trained_token_are_not_stored() -> None:
    untrained = replace(sample("a", (9, 9), (3,)), trained=(False,))
    tail = replace(sample("a", (1, 2), (3, 4, 5)), trained=(True, False, False))
    without_reply = sample("a", (8,), ())
    (batch,) = pack([untrained, tail, without_reply], 100)
    assert batch.token_ids.tolist() == [1, 2]
    assert batch.labels.tolist() == [3]
    assert batch.sequences.tolist() == [1]
    assert pack([untrained], 100) == []
    assert unpack([], [], [without_reply]) == [()]


def test_a_trained_first_token_of_a_sequence_is_refused() -> None:
    message = r"trajectory x, turn 0 \(a\): the first token of the sequence is trained"
    with pytest.raises(ValueError, match=message):
        pack([sample("a", (), (1, 2))], 100)


def test_a_microbatch_has_one_agent_and_no_more_tokens_than_its_budget() -> None:
    replies = [(1, 1, 1), (2, 2, 2, 2), (3, 3), (4,) * 9]
    samples = [sample("b", (1, 2), (3,)), *(sample("a", PROMPT, reply) for reply in replies)]
    batches = pack(samples, 15)
    assert [b.agent for b in batches] == ["a", "a", "a", "b"]
    stem = Segment(tokens=10)
    assert [b.segments for b in batches[:3]] == [
        (Segment(tokens=18),),  # one sequence may exceed the budget
        (stem, Segment(tokens=2, parent=0), Segment(tokens=3, parent=0)),
        (Segment(tokens=11),),
    ]
    assert sum(len(b.labels) for b in batches) == 19


def test_the_largest_sequences_are_packed_first() -> None:
    samples = [sample("a", (n,) * n, (0,)) for n in (3, 6, 4, 7)]
    batches = pack(samples, 10)
    assert [sorted(segment.tokens for segment in batch.segments) for batch in batches] == [
        [3, 7],
        [4, 6],
    ]


def token_counts(batches: Sequence[Microbatch]) -> list[int]:
    return [len(batch.token_ids) for batch in batches]


def test_every_rank_gets_a_micro_batch() -> None:
    tree = [sample("a", PROMPT, (token,) * 5) for token in (1, 2, 3, 4)]
    assert len(pack(tree, 100)) == 1
    # Both ranks store the prompt.
    first, second = pack(tree, 100, CostModel(dp=2))
    assert token_counts([first, second]) == [18, 18]
    assert sorted(set(first.sequences.tolist()) | set(second.sequences.tolist())) == [0, 1, 2, 3]
    # One of three ranks gets two replies.
    assert sorted(token_counts(pack(tree, 100, CostModel(dp=3)))) == [14, 14, 18]
    # A single sequence cannot be divided.
    assert len(pack(tree[:1], 100, CostModel(dp=2))) == 1


def test_a_pipeline_gets_more_micro_batches_if_that_is_faster() -> None:
    # With two stages, 80 tokens take 80 + 80 in one micro-batch, 80 + 40 in two, and 80 + 20 in four.
    unshared = [sample("a", (token,) * 20, (0,)) for token in (1, 2, 3, 4)]
    assert token_counts(pack(unshared, 100, CostModel(pp=2))) == [20] * 4
    # One micro-batch of 1004 tokens takes 1004, and two of 1002 would take 1503.
    stem = tuple(range(1000))
    tree = [sample("a", stem, (token,) * 3) for token in (1, 2)]
    assert len(pack(tree, 2000, CostModel(pp=2))) == 1


def test_packing_does_not_depend_on_the_order_of_samples() -> None:
    samples = [sample("a", PROMPT, (i, i % 3, 7)) for i in range(9)]
    samples += [sample("a", (5, i), (i,) * i) for i in range(9)]
    batches = pack(samples, 40, CostModel(dp=2))
    batches_of_reversed = pack(samples[::-1], 40, CostModel(dp=2))
    for batch, other_batch in zip(batches, batches_of_reversed, strict=True):
        assert batch.segments == other_batch.segments
        assert batch.token_ids.tolist() == other_batch.token_ids.tolist()


def test_without_sharing_every_sample_is_stored_separately() -> None:
    samples = [sample("a", PROMPT, (4, 5)), sample("a", PROMPT, (6, 7))]
    (batch,) = pack(samples, 100, share=False)
    assert batch.segments == (Segment(tokens=11), Segment(tokens=11))
    assert saved_token_share([batch]) == 0.0


def test_rows_are_returned_to_their_samples() -> None:
    samples = [
        sample("b", (1, 2), (3,)),
        sample("a", PROMPT, (3, 4)),
        sample("a", PROMPT, (5, 6, 7)),
    ]
    samples[2] = replace(samples[2], trained=(True, False, True))
    batches = pack(samples, 100)
    rows = [batch.labels.float() for batch in batches]
    first, second, third = unpack(batches, rows, samples)
    assert first == (3.0,)
    assert second == (3.0, 4.0)
    assert third[::2] == (5.0, 7.0)
    assert math.isnan(third[1])  # not trained


def uncredited_samples() -> list[Sample]:
    """Return three replies to a prompt of ten tokens and one to another prompt, without advantages."""
    prompts = [PROMPT, PROMPT, PROMPT, (50, 51, 52)]
    return [
        replace(sample("a", prompt, (4 + i, 5, 6)), turn=i, advantages=None, weight=1.0)
        for i, prompt in enumerate(prompts)
    ]


def assert_bitwise_equal(batch: Microbatch, expected: Microbatch) -> None:
    """Assert that all fields are equal; NaN equals NaN."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        expected_value = getattr(expected, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-9.0), expected_value.nan_to_num(-9.0)), field.name
        else:
            assert value == expected_value, field.name


def test_advantages_and_references_are_added_without_packing_again() -> None:
    samples = uncredited_samples()
    packed = PackedSamples(samples, 100)
    (microbatch,) = packed.microbatches
    reference = torch.arange(len(microbatch.labels), dtype=torch.float32)
    rows = packed.unpack([reference])
    credited = [
        replace(sample, reference=row, advantages=(float(i),) * 3, weight=0.5 + i)
        for i, (sample, row) in enumerate(zip(samples, rows, strict=True))
    ]
    (batch,) = packed.training_microbatches(credited[::-1])  # in any order
    (expected,) = pack(credited, 100)
    assert_bitwise_equal(batch, expected)
    assert batch.reference is not None
    assert torch.equal(batch.reference, reference)
    assert batch.token_ids is microbatch.token_ids


def test_segments_of_untrained_samples_are_removed() -> None:
    packed = PackedSamples(uncredited_samples(), 100)
    (microbatch,) = packed.microbatches
    assert [segment.tokens for segment in microbatch.segments] == [10, 2, 2, 2, 5]
    (batch,) = packed.training_microbatches([uncredited_samples()[1]])
    assert batch.segments == (Segment(tokens=10), Segment(tokens=2, parent=0))
    assert batch.token_ids.tolist() == [*PROMPT, 5, 5]
    assert batch.position_ids.tolist() == list(range(12))
    assert batch.predictors.tolist() == [9, 10, 11]
    assert batch.labels.tolist() == [5, 5, 6]
    assert batch.tokens_without_sharing == 12
    assert packed.training_microbatches([]) == []


def test_without_scores_only_trained_samples_are_packed() -> None:
    samples = uncredited_samples()
    (batch,) = PackedSamples(samples, 100).training_microbatches(samples[3:])
    (expected,) = pack(samples[3:], 100)
    assert_bitwise_equal(batch, expected)


def test_the_experts_of_a_shared_token_are_those_of_the_first_sequence() -> None:
    """Each token has two bytes of experts. The third sample has none."""
    first = replace(sample("a", PROMPT, (4, 5, 6)), routing=bytes(range(24)))
    second = replace(sample("a", PROMPT, (7, 8)), routing=bytes([99] * 22))
    (batch,) = pack([second, first, sample("a", (1,), (2, 3))], 100)
    assert batch.token_ids.tolist() == [*PROMPT, 4, 5, 7, 1, 2]
    assert batch.routing is not None
    experts_of_first = [[2 * i, 2 * i + 1] for i in range(12)]
    assert batch.routing.tolist() == [*experts_of_first, [99, 99], [255, 255], [255, 255]]
    assert pack([sample("a", PROMPT, (4, 5))], 100)[0].routing is None

    # Padding, batches of idle ranks, context-parallel parts and selections have experts too.
    assert batch.padded(17).routing[12:].tolist() == [[99, 99]] + [[255, 255]] * 4
    assert batch.idle().routing.tolist() == [[255, 255]]
    part, _ = batch.padded(16).context_parallel_part(2, 1)
    assert part.routing.tolist() == batch.padded(16).routing[8:].tolist()
    selected = batch.select(batch.sequences == 1)  # of `first`
    assert selected.token_ids.tolist() == [*PROMPT, 4, 5]
    assert selected.routing.tolist() == batch.routing[:12].tolist()
