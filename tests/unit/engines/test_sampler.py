"""Sampled tokens follow their distribution, and depend on their seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engines.embedded.sampling import sample_tokens, uniforms

DRAWS = 40_000
PROBS = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04, 0.0, 0.0])


def draw(
    probs: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> np.ndarray:
    """Return the frequencies of tokens over `DRAWS` rows with seeds 0, 1, 2, ..."""
    logits = torch.from_numpy(np.log(np.maximum(probs, 1e-30))).float().expand(DRAWS, -1)
    full = np.full(DRAWS, 1.0, dtype=np.float32)
    tokens, _ = sample_tokens(
        logits,
        temperature=full * np.float32(temperature),
        top_p=full * np.float32(top_p),
        top_k=np.full(DRAWS, top_k),
        uniform=uniforms(np.arange(DRAWS, dtype=np.uint64), np.full(DRAWS, 3)),
    )
    return np.bincount(tokens.numpy(), minlength=len(probs)) / DRAWS


@pytest.mark.parametrize(
    ("settings", "candidates"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.7}, 3),  # 0.4 + 0.25 < 0.7 <= 0.4 + 0.25 + 0.15
        ({"top_p": 0.65 - 1e-3}, 2),
        ({"top_p": 0.7, "top_k": 2}, 2),
        ({"top_p": 1e-6}, 1),
    ],
)
def test_frequencies_pass_chi_square(settings: dict, candidates: int) -> None:
    order = np.random.default_rng(0).permutation(len(PROBS))
    expected = PROBS ** (1 / settings.get("temperature", 1.0))
    expected[candidates:] = 0
    expected /= expected.sum()
    frequencies = draw(PROBS[order], **settings)[np.argsort(order)]
    assert frequencies[expected == 0].sum() == 0
    possible = expected > 0
    squares = (frequencies[possible] - expected[possible]) ** 2
    chi_square = (DRAWS * squares / expected[possible]).sum()
    assert chi_square < 20.5  # 99.9 % point of chi-square with 5 degrees of freedom


def test_uniforms_depend_on_seed_and_position_as_in_splitmix64() -> None:
    seeds = np.array([7, 7, 8, 2**64 - 1], dtype=np.uint64)
    first = uniforms(seeds, np.array([0, 1, 0, 5]))
    assert first.dtype == np.float32
    assert len(set(first.tolist())) == 4
    assert uniforms(seeds[1:2], np.array([1]))[0] == first[1]
    # splitmix64's published second output for seed 0 is 0x6e789e6aa1b965f4; a zero seed stays zero when mixed.
    assert uniforms(np.zeros(1, dtype=np.uint64), np.array([1]))[0] == np.float32(0x6E789E / 2**24)


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    grid = uniforms(
        np.arange(200, dtype=np.uint64).repeat(200), np.tile(np.arange(200), 200)
    ).reshape(200, 200)
    assert abs(grid.mean() - 0.5) < 4 / np.sqrt(12 * grid.size)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


def test_the_largest_uniform_still_hits_a_token_with_mass() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(500, 300)) * 4).float()
    logits[:, 200:] = -1e9
    edge = np.full(500, 1 - 2.0**-24, dtype=np.float32)
    ones = np.ones(500, dtype=np.float32)
    for point in (edge, np.zeros(500, dtype=np.float32)):
        tokens, logprobs = sample_tokens(
            logits,
            temperature=ones,
            top_p=ones,
            top_k=np.zeros(500, dtype=np.int64),
            uniform=point,
        )
        assert tokens.max() < 200
        assert logprobs.min() > -60


def test_greedy_rows_report_log_probabilities_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, np.log(3.0)], [0.0, np.log(3.0)]])
    tokens, logprobs = sample_tokens(
        logits.float(),
        temperature=np.array([0.0, 0.5], dtype=np.float32),
        top_p=np.ones(2, dtype=np.float32),
        top_k=np.zeros(2, dtype=np.int64),
        uniform=np.array([0.0, 0.99], dtype=np.float32),
    )
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == pytest.approx([np.log(0.75), np.log(0.9)], abs=1e-6)
