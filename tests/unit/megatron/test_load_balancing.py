"""What a trainer is told and fed: its head, and work dealt so that no rank waits long."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.batch import CostModel, Microbatch, Segment, balance_work, pairs
from mcore_mas.megatron.spec import TrainerSpec
from rollout.models.architecture import Architecture, read_architecture
from tests.support import reference


def test_the_dearest_goes_first_to_the_rank_with_least() -> None:
    # 7 -> 0; 5 -> 1; 4 -> 1 (5 < 7); 3 -> 0 (7 < 9); 1 -> 1 (9 < 10)
    assert balance_work([3.0, 7.0, 1.0, 5.0, 4.0], 2) == [[0, 1], [2, 3, 4]]


def test_equal_pieces_go_round_and_some_ranks_get_none() -> None:
    assert balance_work([2.0, 2.0, 2.0], 2) == [[0, 2], [1]]
    assert balance_work([1.0], 3) == [[0], [], []]
    assert balance_work([], 2) == [[], []]


@pytest.fixture
def architecture(tmp_path: Path) -> Architecture:
    reference.make_model("qwen2", tmp_path)
    return read_architecture(tmp_path)


def microbatch(*segments: Segment, rows: int) -> Microbatch:
    tokens = sum(segment.tokens for segment in segments)
    zeros, numbers = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    return Microbatch(
        agent="a",
        segments=segments,
        unshared=tokens,
        token_ids=torch.arange(tokens),
        position_ids=torch.arange(tokens),
        predictors=numbers,
        labels=numbers,
        temperatures=torch.ones(rows),
        sequences=numbers,
        behaviour=zeros,
        advantages=zeros,
        weights=zeros,
        kl_coef=zeros,
        entropy_coef=zeros,
        returns=zeros,
    )


def test_operations_by_hand(architecture: Architecture) -> None:
    # hidden 64, 4 heads and 2 key/value heads of 16, ffn 96, vocabulary 101, 2 layers
    weights = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    # a prompt of 4 sees 1 + 2 + 3 + 4; replies of 2 and 6 see 5 + 6 and 5 + 6 + ... + 10
    seen = 10 + 11 + 45
    batch = microbatch(
        Segment(tokens=4), Segment(tokens=2, parent=0), Segment(tokens=6, parent=0), rows=8
    )
    policy = CostModel(architecture=architecture)
    assert policy.work_of(batch) == 2 * (2 * (12 * weights + 2 * seen * 64) + 8 * 64 * 101)
    assert policy.flops(batch) == 3 * policy.work_of(batch)
    critic = CostModel(architecture=architecture, value_head=True)
    assert critic.work_of(batch) == 2 * (2 * (12 * weights + 2 * seen * 64) + 8 * 64)


def test_operations_of_a_mixture_by_hand(tmp_path: Path) -> None:
    reference.make_model("qwen3_moe", tmp_path, layers=3)
    # hidden 64, 4 heads and 2 key/value heads of 32; of 3 layers one is dense (96), two send a token to 2 of 4 (48)
    attention, dense, sparse = 64 * (2 * 128 + 2 * 64), 64 * 3 * 96, 64 * (2 * 3 * 48 + 4)
    batch = microbatch(Segment(tokens=4), Segment(tokens=2, parent=0), rows=2)
    weights = 3 * attention + dense + 2 * sparse
    seen = 10 + 11
    want = 2 * (6 * weights + 3 * 2 * seen * 128 + 2 * 64 * 101)
    assert CostModel(architecture=read_architecture(tmp_path)).work_of(batch) == want


def test_a_chain_of_single_tokens_sees_what_one_segment_of_them_does() -> None:
    chain = [Segment(tokens=1, parent=i - 1) for i in range(64)]
    assert pairs(chain) == pairs([Segment(tokens=64)]) == 64 * 65 // 2 == 2080


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_those_of_the_mask(seed: int) -> None:
    draw = random.Random(seed)
    segments = [
        Segment(tokens=draw.randint(1, 9), parent=draw.randint(-1, i - 1)) for i in range(12)
    ]
    owner = [i for i, segment in enumerate(segments) for _ in range(segment.tokens)]

    def leads_to(above: int, below: int) -> bool:
        return below == above or (below >= 0 and leads_to(above, segments[below].parent))

    assert pairs(segments) == sum(
        leads_to(owner[k], owner[q]) for q in range(len(owner)) for k in range(q + 1)
    )


def test_operations_of_adapters_by_hand(architecture: Architecture) -> None:
    batch = microbatch(Segment(tokens=4), rows=3)
    plain = CostModel(architecture=architecture)
    adapted = replace(plain, lora=LoraConfig(rank=8, alpha=8, targets=("q", "down")))
    weights, attention, head = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 96), 2 * 2 * 64, 64 * 101
    # forward and backward through all weights and the pairs' gradients; of the adapters' own weights, gradients too
    through = 2 * 2 * (4 * weights + 3 * head) + 3 * 2 * 10 * attention
    assert adapted.flops(batch) == through + 3 * 2 * 4 * 2 * 8 * ((64 + 64) + (96 + 64))


def test_a_head_goes_with_its_objective() -> None:
    with pytest.raises(
        ValueError, match="head 'value' with Objective; a value head goes with a ValueObjective"
    ):
        TrainerSpec(model="m", head="value")
    assert (
        TrainerSpec(model="m", head="value", objective=ValueObjective(), tp=2, pp=2, dp=3).ranks
        == 12
    )


def test_padding_is_a_sequence_of_its_own() -> None:
    batch = microbatch(Segment(tokens=2), Segment(tokens=1, parent=0), rows=1)
    padded = batch.padded(5)
    assert padded.segments == (*batch.segments, Segment(tokens=2))
    assert padded.token_ids.tolist() == [0, 1, 2, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert padded.predictors is batch.predictors
    assert batch.padded(3) is batch


def test_an_idle_micro_batch_has_the_same_columns_and_no_weight() -> None:
    idle = microbatch(Segment(tokens=2), Segment(tokens=3, parent=0), rows=3).idle()
    assert (idle.segments, idle.token_ids.tolist(), idle.predictors.tolist()) == (
        (Segment(tokens=1),),
        [0],
        [0],
    )
    assert (idle.weights.tolist(), idle.temperatures.tolist(), idle.returns.tolist()) == (
        [0.0],
        [1.0],
        [0.0],
    )
    assert idle.values is None


def test_a_pass_takes_as_long_as_its_busiest_rank_and_the_wait_of_its_stages() -> None:
    assert (
        CostModel(dp=2).makespan([3.0, 7.0, 1.0, 5.0, 4.0]) == 10.0
    )  # dealt as above: 7 + 3, 5 + 4 + 1
    assert CostModel(pp=2).makespan([4.0, 2.0]) == (6 + 4) / 2  # one more turn, of the largest
    assert CostModel(dp=2, pp=2).makespan([4.0, 2.0]) == (4 + 4) / 2


def test_as_many_micro_batches_as_ranks_and_up_to_twice_the_stages() -> None:
    assert CostModel().counts(3) == []
    assert CostModel(dp=2).counts(3) == [4]
    assert CostModel(dp=2, pp=2).counts(1) == [2, 4, 6, 8]
    assert CostModel(pp=2).counts(9) == [9]
    assert CostModel(pp=2, vpp=2).counts(1) == [2, 4]
