"""Micro-batches: parts and padded copies, their work, and its distribution over ranks."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mcore_mas.config.policy import LoraConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import (
    CostModel,
    Microbatch,
    Segment,
    attention_pairs,
    balance_work,
)
from mcore_mas.packing.pack import pack
from rollout.models.architecture import Architecture, read_architecture
from tests.support import reference


@pytest.fixture
def architecture(tmp_path: Path) -> Architecture:
    reference.make_model("qwen2", tmp_path)
    return read_architecture(tmp_path)


def microbatch(*segments: Segment, rows: int) -> Microbatch:
    """Return a micro-batch of these segments, whose rows all predict token 0 from token 0."""
    tokens = sum(segment.tokens for segment in segments)
    zeros = torch.zeros(rows)
    integer_zeros = torch.zeros(rows, dtype=torch.int64)
    return Microbatch(
        agent="a",
        segments=segments,
        tokens_without_sharing=tokens,
        token_ids=torch.arange(tokens),
        position_ids=torch.arange(tokens),
        predictors=integer_zeros,
        labels=integer_zeros,
        temperatures=torch.ones(rows),
        sequences=integer_zeros,
        behaviour=zeros,
        advantages=zeros,
        weights=zeros,
        kl_coef=zeros,
        entropy_coef=zeros,
        returns=zeros,
    )


def sample(completion_ids: tuple[int, ...]) -> Sample:
    """Return a sample with the prompt 1, 2, 3."""
    return Sample(
        policy="p",
        agent="a",
        task="t",
        trajectory="0",
        turn=0,
        prompt_ids=(1, 2, 3),
        completion_ids=completion_ids,
        weight=1.0,
    )


def pairs_of_mask(segments: Sequence[Segment]) -> int:
    """Count the pairs of a query and a key that attention computes, one by one."""
    segment_of_token = [
        index for index, segment in enumerate(segments) for _ in range(segment.tokens)
    ]

    def is_on_path(segment: int, ancestor: int) -> bool:
        if segment < 0:
            return False
        return segment == ancestor or is_on_path(segments[segment].parent, ancestor)

    pairs = 0
    for query, query_segment in enumerate(segment_of_token):
        for key_segment in segment_of_token[: query + 1]:
            pairs += is_on_path(query_segment, key_segment)
    return pairs


def test_the_most_expensive_goes_first_to_the_rank_with_the_least_work() -> None:
    # 7 -> 0; 5 -> 1; 4 -> 1 (5 < 7); 3 -> 0 (7 < 9); 1 -> 1 (9 < 10)
    assert balance_work([3.0, 7.0, 1.0, 5.0, 4.0], 2) == [[0, 1], [2, 3, 4]]


def test_equal_micro_batches_are_dealt_in_turn_and_some_ranks_get_none() -> None:
    assert balance_work([2.0, 2.0, 2.0], 2) == [[0, 2], [1]]
    assert balance_work([1.0], 3) == [[0], [], []]
    assert balance_work([], 2) == [[], []]


def test_work_by_hand(architecture: Architecture) -> None:
    # hidden 64, 4 heads and 2 key/value heads of 16, ffn 96, vocabulary 101, 2 layers
    weights = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    # Tokens of the prompt attend to 1, 2, 3 and 4 tokens, those of the replies to 5 and 6, and to
    # 5, 6, ..., 10.
    pairs = 10 + 11 + 45
    layers_work = 2 * (12 * weights + 2 * pairs * 64)
    batch = microbatch(
        Segment(tokens=4), Segment(tokens=2, parent=0), Segment(tokens=6, parent=0), rows=8
    )
    policy = CostModel(architecture=architecture)
    assert policy.batch_work(batch) == 2 * (layers_work + 8 * 64 * 101)
    assert policy.flops(batch) == 3 * policy.batch_work(batch)

    critic = CostModel(architecture=architecture, value_head=True)
    assert critic.batch_work(batch) == 2 * (layers_work + 8 * 64)


def test_work_of_a_mixture_of_experts_by_hand(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path, layers=3)
    # hidden 64, 4 heads and 2 key/value heads of 32; one of 3 layers is dense (ffn 96), and the
    # others send each token to 2 of 4 experts (ffn 48)
    attention = 64 * (2 * 128 + 2 * 64)
    dense = 64 * 3 * 96
    sparse = 64 * (2 * 3 * 48 + 4)
    weights = 3 * attention + dense + 2 * sparse
    pairs = 10 + 11
    batch = microbatch(Segment(tokens=4), Segment(tokens=2, parent=0), rows=2)
    cost = CostModel(architecture=read_architecture(tmp_path))
    assert cost.batch_work(batch) == 2 * (6 * weights + 3 * 2 * pairs * 128 + 2 * 64 * 101)


def test_operations_of_adapters_by_hand(architecture: Architecture) -> None:
    batch = microbatch(Segment(tokens=4), rows=3)
    lora = LoraConfig(rank=8, alpha=8, targets=("q", "down"))
    weights = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 96)
    head = 64 * 101
    # Frozen weights are used forward and for the gradients of activations; attention and adapters
    # have gradients of both factors.
    frozen = 2 * 2 * (4 * weights + 3 * head)
    attention = 3 * 2 * 10 * (2 * 2 * 64)
    adapters = 3 * 2 * 4 * 2 * 8 * ((64 + 64) + (96 + 64))
    cost = CostModel(architecture=architecture, lora=lora)
    assert cost.flops(batch) == frozen + attention + adapters


def test_a_chain_of_single_tokens_has_as_many_pairs_as_one_segment() -> None:
    chain = [Segment(tokens=1, parent=i - 1) for i in range(64)]
    assert attention_pairs(chain) == 64 * 65 // 2
    assert attention_pairs([Segment(tokens=64)]) == 64 * 65 // 2


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_those_of_the_attention_mask(seed: int) -> None:
    draw = random.Random(seed)
    segments = [
        Segment(tokens=draw.randint(1, 9), parent=draw.randint(-1, i - 1)) for i in range(12)
    ]
    assert attention_pairs(segments) == pairs_of_mask(segments)


def test_padding_is_a_tree_of_its_own() -> None:
    batch = microbatch(Segment(tokens=2), Segment(tokens=1, parent=0), rows=1)
    padded = batch.padded(5)
    assert padded.segments == (*batch.segments, Segment(tokens=2))
    assert padded.token_ids.tolist() == [0, 1, 2, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert padded.predictors is batch.predictors
    assert batch.padded(3) is batch


def test_an_idle_micro_batch_has_the_same_columns_and_no_weight() -> None:
    idle = microbatch(Segment(tokens=2), Segment(tokens=3, parent=0), rows=3).idle()
    assert idle.segments == (Segment(tokens=1),)
    assert idle.token_ids.tolist() == [0]
    assert idle.predictors.tolist() == [0]
    assert idle.weights.tolist() == [0.0]
    assert idle.temperatures.tolist() == [1.0]
    assert idle.returns is not None
    assert idle.returns.tolist() == [0.0]
    assert idle.values is None


def test_a_context_parallel_rank_has_consecutive_tokens_and_the_rows_they_predict() -> None:
    # Token 3 predicts 4 and 6, and token 4 predicts 5.
    (batch,) = pack([sample((4, 5)), sample((6,))], 100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4]

    part, rows = batch.context_parallel_part(2, 1)
    assert part.token_ids.tolist() == [3, 4]
    assert part.position_ids.tolist() == [2, 3]
    assert part.predictors.tolist() == [0, 1, 0]
    assert rows.tolist() == [0, 1, 2]


def test_a_context_parallel_rank_with_padding_only_has_no_rows() -> None:
    (batch,) = pack([sample((4, 5)), sample((6,))], 100)
    padded = batch.padded(8)

    first, first_rows = padded.context_parallel_part(2, 0)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.position_ids.tolist() == [0, 1, 2, 3]
    assert first.predictors.tolist() == [2, 3, 2]
    assert first.labels.tolist() == [4, 5, 6]
    assert first_rows.tolist() == [0, 1, 2]

    last, last_rows = padded.context_parallel_part(2, 1)
    assert last.token_ids.tolist() == [0, 0, 0, 0]
    assert last.position_ids.tolist() == [0, 1, 2, 3]
    assert last.predictors.tolist() == []
    assert last.labels.tolist() == []
    assert last_rows.tolist() == []


def test_a_pass_takes_the_time_of_the_busiest_rank_and_the_waits_of_its_stages() -> None:
    # Ranks get 7 + 3, and 5 + 4 + 1.
    assert CostModel(dp=2).makespan([3.0, 7.0, 1.0, 5.0, 4.0]) == 10.0
    # With two stages, each stage waits once for the largest micro-batch.
    assert CostModel(pp=2).makespan([4.0, 2.0]) == (6 + 4) / 2
    assert CostModel(dp=2, pp=2).makespan([4.0, 2.0]) == (4 + 4) / 2


def test_batch_counts_are_multiples_of_the_ranks_up_to_twice_the_stages() -> None:
    assert CostModel().batch_counts(3) == []
    assert CostModel(dp=2).batch_counts(3) == [4]
    assert CostModel(dp=2, pp=2).batch_counts(1) == [2, 4, 6, 8]
    assert CostModel(pp=2).batch_counts(9) == [9]
    assert CostModel(pp=2, vpp=2).batch_counts(1) == [2, 4]
