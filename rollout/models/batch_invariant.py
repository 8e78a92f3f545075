"""Matrix products and attention whose result for a token does not depend on its batch (float32, CPU).

An engine decodes one token of each sequence at a time, while a trainer computes whole sequences.
Matrix libraries sum products of different sizes in different orders, so engine and trainer get
log-probabilities that differ in their last bits. However, in a product of at least `MIN_ROWS` rows, MKL gives each row
the same bits whatever the other rows are; and in a product that sums at most `MAX_TERMS` terms,
further terms that are zero do not change the bits of the sum. Every product here has at least
`MIN_ROWS` rows. Attention's sum over keys, which may contain such zeros, is made of parts of at most
`MAX_TERMS` terms. All functions are differentiable.

The technique is batch-invariant inference (He et al., "Defeating Nondeterminism in LLM Inference",
2025).
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

MIN_ROWS = 16  # minimum number of rows of a product
# Maximum number of terms in a product's sum, if some of them may be padding zeros. MKL on AMD's
# processors splits a longer sum at a point that depends on its length.
MAX_TERMS = 128
# The number of keys is a multiple of this, so that a softmax adds the same numbers in the same SIMD
# lanes.
KEY_MULTIPLE = 16


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weightᵀ [..., rows] of x [..., inputs] and weight [rows, inputs]."""
    flat = x.flatten(0, -2)
    missing_rows = max(0, MIN_ROWS - len(flat))
    padded = pad(flat, (0, 0, 0, missing_rows)) if missing_rows else flat
    product = padded @ weight.t()
    return product[: len(flat)].view(*x.shape[:-1], len(weight))


def row_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q keys + mask) values [B, Q, d].

    Args:
        q: scaled queries [B, Q, d].
        keys: [B, d, K]. K is a multiple of `KEY_MULTIPLE`; masked keys may have any finite values.
        values: [B, K, d]; masked values may also be any finite numbers.
        mask: 0 or -inf, [B / n, Q or 1, K]; n consecutive elements of the batch share a mask.
    """
    query_count = q.shape[1]
    missing_rows = max(0, MIN_ROWS - query_count)
    if missing_rows:
        q = pad(q, (0, 0, 0, missing_rows))
        if mask.shape[1] > 1:
            mask = pad(mask, (0, 0, 0, missing_rows))

    scores = torch.bmm(q, keys).unflatten(0, (len(mask), -1)) + mask[:, None]
    weights = scores.softmax(-1).flatten(0, 1)

    out = torch.bmm(weights[..., :MAX_TERMS], values[:, :MAX_TERMS])
    for first in range(MAX_TERMS, keys.shape[-1], MAX_TERMS):
        terms = slice(first, first + MAX_TERMS)
        out = out + torch.bmm(weights[..., terms], values[:, terms])
    return out[:, :query_count]


def products_are_batch_invariant(weights: Iterable[Tensor]) -> bool:
    """Return True if this machine's matrix library gives a row the same bits in every batch.

    This is found by trial: products with `weights` [rows, inputs] are computed for all rows at once
    and for some of them, and attention for many keys and for a prefix of them.
    """
    generator = torch.Generator().manual_seed(0)
    if not all(_product_is_batch_invariant(weight, generator) for weight in weights):
        return False
    return _attention_is_batch_invariant(generator)


def _product_is_batch_invariant(weight: Tensor, generator: torch.Generator) -> bool:
    """Return True if parts of a batch get the same bits as the whole batch."""
    x = torch.randn(3 * MIN_ROWS + 5, weight.shape[1], generator=generator)
    whole = row_product(x, weight)
    parts = [
        slice(0, 1),
        slice(1, MIN_ROWS),
        slice(MIN_ROWS, 2 * MIN_ROWS),
        slice(2 * MIN_ROWS, None),
    ]
    return all(torch.equal(row_product(x[part], weight), whole[part]) for part in parts)


def _attention_is_batch_invariant(generator: torch.Generator) -> bool:
    """Return True if one query gets the same bits with fewer keys, and without the other queries."""
    key_count = 2 * MAX_TERMS
    keys = torch.randn(2, 64, key_count, generator=generator)
    values = torch.randn(2, 64, key_count, generator=generator).transpose(1, 2)
    q = torch.randn(2, 50, 64, generator=generator) / 8
    for visible in range(KEY_MULTIPLE, key_count, KEY_MULTIPLE):
        mask = torch.where(torch.arange(key_count) < visible, 0.0, -torch.inf)[None, None]
        whole = row_attention(q, keys, values, mask)
        part = row_attention(
            q[:, 7:8], keys[..., :visible], values[:, :visible], mask[..., :visible]
        )
        if not torch.equal(part, whole[:, 7:8]):
            return False
    return True
