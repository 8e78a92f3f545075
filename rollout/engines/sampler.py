"""Draws one token for every row of logits, each row from its own counter-based random stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float32 in [0, 1) per (seed, position), independent of everything else.

    `seeds` is uint64 [N] and `positions` an integer [N]: the index of the token in its completion.
    """
    counter = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(counter) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: np.ndarray) -> np.ndarray:
    # splitmix64, Steele, Lea and Flood 2014
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def choose(
    logits: Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, uniform: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Token int64 [N] and log-probability float32 [N] for each row of `logits` float32 [N, V].

    A token is the inverse of the cumulative distribution at `uniform` [N]. Its log-probability is that of the full
    distribution after temperature, before top-p and top-k; NaN where the logits are not finite. Temperature 0 takes
    the most likely token; its log-probability is that of temperature 1. Top-k and top-p both look at the distribution
    after temperature (a token stays when it is among the k likeliest and the mass before it is below p), as in SGLang.
    """
    device = logits.device
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = np.where(greedy, 1, temperature).astype(np.float32)
        logprobs = (logits / torch.from_numpy(scale).to(device)[:, None]).log_softmax(-1)
    else:
        logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    cut = np.flatnonzero((top_p < 1) | (top_k > 0))
    if len(cut):
        rows, p, k = (torch.from_numpy(array).to(device) for array in (cut, top_p[cut], top_k[cut]))
        probs[rows] = _truncate(probs[rows], p, k)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift uniform * total to total itself, past the last token that has any mass.
    point = torch.from_numpy(uniform).to(device)[:, None] * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)  # NaN sorts last
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device), logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
