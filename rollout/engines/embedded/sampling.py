"""Sampling of the next token, with random numbers that depend on seed and position alone."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # increment of splitmix64's counter
_BLOCK = 64  # number of neighbouring tokens whose weights are summed first; see `_invert_cdf`


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float32 in [0, 1) for each pair of seed and position [N]; it depends on nothing else.

    Args:
        seeds: uint64 [N].
        positions: index of the token in its completion, integer [N].
    """
    counter = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    upper_bits = _mix(counter) >> np.uint64(40)  # 24 bits, as many as float32 holds exactly
    return upper_bits.astype(np.float32) * np.float32(2.0**-24)


def _mix(z: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers as splitmix64 does (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def sample_tokens(
    logits: Tensor,
    *,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    uniform: np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of logits by inverting the cumulative distribution.

    Top-k and top-p both look at the distribution after temperature, as in SGLang: a token stays if
    it is among the k likeliest and the probability of all likelier tokens is below p. Temperature
    0 takes the likeliest token.

    Args:
        logits: float32 [N, V].
        temperature, top_p: float32 [N].
        top_k: int64 [N]; 0 for no limit.
        uniform: float32 [N] in [0, 1), where the distribution is inverted.

    Returns:
        Tokens, int64 [N], and their log-probabilities, float32 [N]. These are of the full
        distribution after temperature, before top-p and top-k, and at temperature 1 for greedy
        rows. They are NaN in a row whose logits include NaN or ∞, or are all -∞.
    """
    device = logits.device
    greedy = temperature == 0
    if (temperature != 1).any():
        scale = np.where(greedy, 1, temperature).astype(np.float32)
        logits = logits / torch.from_numpy(scale).to(device)[:, None]
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    # The sum is of weights relative to the peak, as in the trainer's exact head, so that both give
    # the same bits.
    log_sum = weights.sum(-1, keepdim=True).log_()

    truncated = np.flatnonzero((top_p < 1) | (top_k > 0))
    if len(truncated):
        rows = torch.from_numpy(truncated).to(device)
        probabilities = (logits[rows] - peak[rows] - log_sum[rows]).exp_()
        weights[rows] = _truncate(
            probabilities,
            top_p=torch.from_numpy(top_p[truncated]).to(device),
            top_k=torch.from_numpy(top_k[truncated]).to(device),
        )

    tokens = _invert_cdf(weights, torch.from_numpy(uniform).to(device)[:, None])
    if greedy.any():
        is_greedy = torch.from_numpy(greedy).to(device)[:, None]
        tokens = torch.where(is_greedy, logits.argmax(-1, keepdim=True), tokens)
    logprobs = logits.gather(-1, tokens) - peak - log_sum
    return tokens[:, 0], logprobs[:, 0]


def sample_on_device(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample as `sample_tokens` without top-k and top-p.

    The host reads no value from the device, so that a CUDA graph can contain the sampling.

    Args:
        logits: float32 [N, V].
        temperature, uniform: float32 [N], on the device.
    """
    greedy = (temperature == 0)[:, None]
    logits = logits / torch.where(greedy, 1.0, temperature[:, None])
    peak, likeliest = logits.max(-1, keepdim=True)
    weights = (logits - peak).exp_()
    log_sum = weights.sum(-1, keepdim=True).log_()
    tokens = torch.where(greedy, likeliest, _invert_cdf(weights, uniform[:, None]))
    logprobs = logits.gather(-1, tokens) - peak - log_sum
    return tokens[:, 0], logprobs[:, 0]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return the log-probability [N] of a token of each row of logits, as `sample_tokens` computes it.

    Args:
        logits: float32 [N, V].
        tokens: int64 [N].
        temperature: divides the logits; above 0.
    """
    if temperature != 1:
        logits = logits / temperature
    peak = logits.amax(-1, keepdim=True)
    log_sum = (logits - peak).exp_().sum(-1, keepdim=True).log_()
    return (logits.gather(-1, tokens[:, None]) - peak - log_sum)[:, 0]


def likeliest_tokens(
    logits: Tensor, *, temperature: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens of each row of logits, and their log-probabilities.

    Args:
        logits: float32 [N, V].
        temperature: float32 [N]; 0 stands for 1, as in `sample_tokens`.
        count: number of tokens, k.

    Returns:
        Tokens, int64 [N, k], the likeliest first, and log-probabilities, float32 [N, k].
    """
    scale = np.where(temperature == 0, 1, temperature).astype(np.float32)
    scaled = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    top = scaled.log_softmax(-1).topk(min(count, logits.shape[1]))
    return top.indices.cpu().numpy(), top.values.cpu().numpy()


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample a token [N, 1] for each row by inverting the cumulative distribution.

    This is the first token at which the running sum of `weights` [N, V] exceeds `uniform` [N, 1]
    times their total. The search compares sums of blocks of tokens first, and then the tokens of the
    block that it has found.
    """
    missing = -weights.shape[1] % _BLOCK
    padded = F.pad(weights, (0, missing)) if missing else weights
    blocks = padded.unflatten(1, (-1, _BLOCK))
    block_sums = blocks.sum(-1).cumsum_(-1)
    point = uniform * block_sums[:, -1:]
    block = _first_above(block_sums, point)
    # Subtract the sum of all blocks before this one.
    point -= torch.where(block > 0, block_sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    sums = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].cumsum_(-1)
    token = block * _BLOCK + _first_above(sums, point)
    return token.clamp_(max=weights.shape[1] - 1)  # NaN may lead to the padding of the last block


def _first_above(sums: Tensor, point: Tensor) -> Tensor:
    """Return the index [N, 1] of the first running sum in `sums` [N, K] above `point` [N, 1].

    Rounding may have lifted `point` to the last sum, which then counts as exceeding it.
    """
    last = sums[:, -1:]
    below = torch.minimum(point, torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(sums, below, right=True)
    return index.clamp_(max=sums.shape[1] - 1)  # NaN is sorted behind all sums


def _truncate(probabilities: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the probabilities [N, V], with 0 for the tokens that top-p [N] or top-k [N] leave out."""
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    keep = (before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered * keep)
