"""Summary of the statistics of tokens as metrics of a step."""

import math

import torch

from mcore_mas.megatron.step.statistics import summarise

NAN = math.nan


def test_statistics_of_two_micro_batches_by_hand() -> None:
    microbatches = [
        {
            "loss": torch.tensor([1.0, 2.0]),
            "kl": torch.tensor([0.0, 1.0]),
            "ratio_max": torch.tensor([1.0, 3.0]),
            "ratio_min": torch.tensor([1.0, 3.0]),
            "reference_kl": torch.tensor([0.5, NAN]),
            "logprob_gap_max": torch.tensor([NAN, NAN]),
        },
        {
            "loss": torch.tensor([4.0]),
            "kl": torch.tensor([5.0]),
            "ratio_max": torch.tensor([2.0]),
            "ratio_min": torch.tensor([0.5]),
            "logprob_gap_max": torch.tensor([NAN]),
        },
    ]
    # Only one token has a log-probability of the reference, and none has one of the sampler.
    assert summarise(microbatches) == {
        "loss": 7.0,
        "tokens": 3.0,
        "kl": 2.0,
        "ratio_max": 3.0,
        "ratio_min": 0.5,
        "reference_kl": 0.5,
    }


def test_an_infinite_maximum_is_kept() -> None:
    microbatch = {"loss": torch.zeros(2), "logprob_gap_max": torch.tensor([0.1, math.inf])}
    assert summarise([microbatch])["logprob_gap_max"] == math.inf
