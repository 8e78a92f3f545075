"""A decoder's operations whose result for a token has the same bits whatever is computed beside it (float32, CPU).

An engine decodes a token of each row while a trainer scores whole sequences, and libraries sum in another order for
either. But MKL's products have the same bits for a row among any `ROWS` or more, and for a sum of up to `TERMS` with
any zeros behind it. Made of such products, engine and trainer come to the same log-probabilities. Batch-invariant
inference is He et al.'s ("Defeating Nondeterminism in LLM Inference", 2025). All of this is differentiable.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS = 16  # that a product has at least
TERMS = 128  # that a product sums at most, where there may be zeros behind them; MKL halves more on AMD's processors
COLUMNS = 16  # that keys are a multiple of: a softmax then sums the same numbers in the same lanes


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ [..., rows] of x [..., inputs] and a weight [rows, inputs]."""
    flat = x.flatten(0, -2)
    missing = max(0, ROWS - len(flat))
    out = (pad(flat, (0, 0, 0, missing)) if missing else flat) @ weight.t()
    return out[: len(flat)].view(*x.shape[:-1], len(weight))


def row_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """softmax(q keys + mask) values [B, Q, d] of q [B, Q, d], scaled, keys [B, d, K] and values [B, K, d].

    Args:
        keys: K is a multiple of `COLUMNS`; what is masked may be any numbers.
        mask: [B / n, Q or 1, K] for n neighbours of the batch each, 0 or -inf.
    """
    size = q.shape[1]
    missing = max(0, ROWS - size)
    if missing:
        q = pad(q, (0, 0, 0, missing))
        mask = pad(mask, (0, 0, 0, missing)) if mask.shape[1] > 1 else mask
    scores = torch.bmm(q, keys).unflatten(0, (len(mask), -1)) + mask[:, None]
    weights = scores.softmax(-1).flatten(0, 1)
    out = torch.bmm(weights[..., :TERMS], values[:, :TERMS])
    for first in range(TERMS, keys.shape[-1], TERMS):
        part = slice(first, first + TERMS)
        out = out + torch.bmm(weights[..., part], values[:, part])
    return out[:, :size]


def products_are_exact(weights: Iterable[Tensor]) -> bool:
    """Whether this machine's library multiplies as this module needs, by trial on some `weights` [rows, inputs]."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        x = torch.randn(3 * ROWS + 5, weight.shape[1], generator=generator)
        whole = row_product(x, weight)
        parts = [slice(0, 1), slice(1, ROWS), slice(ROWS, 2 * ROWS), slice(2 * ROWS, None)]
        if not all(torch.equal(row_product(x[part], weight), whole[part]) for part in parts):
            return False
    keys, values = (torch.randn(2, 64, 2 * TERMS, generator=generator) for _ in range(2))
    q, far = torch.randn(2, 50, 64, generator=generator) / 8, values.transpose(1, 2)
    for seen in range(COLUMNS, 2 * TERMS, COLUMNS):
        mask = torch.where(torch.arange(2 * TERMS) < seen, 0.0, -torch.inf)[None, None]
        wide = row_attention(q, keys, far, mask)
        one = row_attention(q[:, 7:8], keys[..., :seen], far[:, :seen], mask[..., :seen])
        if not torch.equal(one, wide[:, 7:8]):
            return False
    return True
