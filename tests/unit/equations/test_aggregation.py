"""Token weights by hand, and their independence of micro-batches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_mas.equations.losses import AGGREGATIONS, token_weights

# replies of 1, 2 and 5 tokens, and one of which nothing is trained
LENGTHS = torch.tensor([1, 2, 5, 0])
NORM = {"seq_mean_token_sum_norm": 10.0}


def formula(mode: str, replies: list[Tensor], norm: float) -> float:
    """Compute the loss by the formula of the papers, from the token losses of each reply."""
    n = len(replies)
    if mode in ("token_mean", "agent_mean"):  # of one agent
        return float(sum(reply.sum() for reply in replies) / sum(len(reply) for reply in replies))
    if mode == "seq_mean_token_sum":
        return float(sum(reply.sum() for reply in replies) / n)
    if mode == "seq_mean_token_mean":
        return float(sum(reply.mean() for reply in replies) / n)
    assert mode == "seq_mean_token_sum_norm"
    return float(sum(reply.sum() / norm for reply in replies) / n)


def test_weights_by_hand() -> None:
    assert token_weights(LENGTHS, mode="token_mean").tolist() == [1 / 8, 1 / 8, 1 / 8, 0]
    assert token_weights(LENGTHS, mode="seq_mean_token_sum").tolist() == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 0]
    )
    assert token_weights(LENGTHS, mode="seq_mean_token_mean").tolist() == pytest.approx(
        [1 / 3, 1 / 6, 1 / 15, 0]
    )
    weights = token_weights(LENGTHS, mode="seq_mean_token_sum_norm", norm=10.0)
    assert weights.tolist() == pytest.approx([1 / 30, 1 / 30, 1 / 30, 0])
    assert weights.dtype == torch.float64


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_loss_is_the_papers_however_the_samples_are_split(mode: str, microbatches: int) -> None:
    replies = [
        torch.tensor(values).double()
        for values in ([1.0], [2.0, 4.0], [8.0, 1.0, 3.0], [5.0, 6.0, 7.0, 9.0])
    ]
    weights = token_weights(torch.tensor([1, 2, 3, 4]), mode=mode, norm=NORM.get(mode))
    per_batch = len(replies) // microbatches
    loss = 0.0
    for first in range(0, len(replies), per_batch):
        batch = range(first, first + per_batch)
        tokens = torch.cat([replies[i] for i in batch])
        on_tokens = torch.cat([weights[i].repeat(len(replies[i])) for i in batch])
        loss += float((tokens * on_tokens).sum())
    by_hand = {
        "token_mean": 46 / 10,
        "agent_mean": 46 / 10,  # of one agent
        "seq_mean_token_sum": 46 / 4,
        "seq_mean_token_mean": (1 + 3 + 4 + 6.75) / 4,
        "seq_mean_token_sum_norm": 46 / 4 / 10,
    }
    assert loss == pytest.approx(by_hand[mode], rel=1e-15)
    assert loss == pytest.approx(formula(mode, replies, 10.0), rel=1e-15)


@given(
    replies=st.lists(st.lists(st.floats(-9, 9), max_size=6), min_size=1, max_size=8).filter(any),
    splits=st.lists(st.integers(0, 8), max_size=4),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
)
def test_any_split_gives_the_formula(
    replies: list[list[float]], splits: list[int], mode: str
) -> None:
    weights = token_weights(
        torch.tensor([len(reply) for reply in replies]), mode=mode, norm=NORM.get(mode)
    )
    edges = [0, *sorted(min(split, len(replies)) for split in splits), len(replies)]
    loss = sum(
        sum(float(weights[i]) * token for i in range(first, last) for token in replies[i])
        for first, last in itertools.pairwise(edges)
    )
    trained = [torch.tensor(reply, dtype=torch.float64) for reply in replies if reply]
    assert loss == pytest.approx(formula(mode, trained, 10.0), abs=1e-12)
