"""How statistics of tokens become a step's metrics."""

import math

import torch

from mcore_mas.megatron.step.statistics import summarise


def test_statistics_of_all_microbatches_by_hand() -> None:
    nan = math.nan
    rows = [
        {
            "loss": torch.tensor([1.0, 2.0]),
            "kl": torch.tensor([0.0, 1.0]),
            "ratio_max": torch.tensor([1.0, 3.0]),
            "ratio_min": torch.tensor([1.0, 3.0]),
            "reference_kl": torch.tensor([0.5, nan]),
            "logprob_gap_max": torch.tensor([nan, nan]),
        },
        {
            "loss": torch.tensor([4.0]),
            "kl": torch.tensor([5.0]),
            "ratio_max": torch.tensor([2.0]),
            "ratio_min": torch.tensor([0.5]),
            "logprob_gap_max": torch.tensor([nan]),
        },
    ]
    assert (
        summarise(rows)
        == {
            "loss": 7.0,
            "tokens": 3.0,
            "kl": 2.0,
            "ratio_max": 3.0,
            "ratio_min": 0.5,
            "reference_kl": 0.5,  # of the one token that has a reference; nobody was sampled, so there is no gap
        }
    )


def test_an_infinite_extreme_is_not_hidden() -> None:
    rows = [{"loss": torch.zeros(2), "logprob_gap_max": torch.tensor([0.1, math.inf])}]
    assert summarise(rows)["logprob_gap_max"] == math.inf
