"""Two Triton kernels over rows of logits: what the log-probability and the entropy take of them, and their gradient.

`sizes` is (columns of this rank that are tokens, columns, stride of rows). Logits are read once and stay as they are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(logits, labels, temperatures, found, sizes, block: tl.constexpr):
    """Of a row's z = logits / temperature, in `found` [4, rows]: peak, Σ e^(z − peak), Σ z e^(z − peak), label's."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    inverse = 1.0 / tl.load(temperatures + row)
    start = logits + row * sizes[2]
    peak, total, first = -1.0e30, 0.0, 0.0
    for at in range(0, sizes[0], block):
        column = at + tl.arange(0, block)
        z = tl.load(start + column, mask=column < sizes[0], other=float("-inf")) * inverse
        higher = tl.maximum(peak, tl.max(z, 0))
        weights = tl.exp(z - higher)
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 0)
        first = first * shrink + tl.sum(tl.where(weights > 0, weights * z, 0.0), 0)
        peak = higher
    label = tl.load(labels + row)
    mine = (label >= 0) & (label < sizes[0])  # else it is another rank's
    tl.store(found + row, peak)
    tl.store(found + rows + row, total)
    tl.store(found + 2 * rows + row, first)
    tl.store(found + 3 * rows + row, tl.load(start + label, mask=mine, other=0.0) * inverse)


@triton.jit
def gradient_kernel(logits, labels, numbers, gradient, sizes, block: tl.constexpr):
    """The gradient of the logits; `numbers` [5, rows]: temperature, log Z, entropy, gradients of both results."""
    # dH/dz_j = −p_j (log p_j + H); d log p_l/dz_j = [j = l] − p_j
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inverse = 1.0 / tl.load(numbers + row)
    log_z, entropy = tl.load(numbers + rows + row), tl.load(numbers + 2 * rows + row)
    of_logprob, of_entropy = tl.load(numbers + 3 * rows + row), tl.load(numbers + 4 * rows + row)
    z = tl.load(logits + row * sizes[2] + column, mask=column < sizes[0], other=float("-inf")) * inverse
    logp = z - log_z
    p = tl.exp(logp)
    logp = tl.where(p > 0, logp, 0.0)
    hit = tl.where((column == tl.load(labels + row)) & (column < sizes[0]), of_logprob, 0.0)
    value = (hit - p * (of_logprob + of_entropy * (logp + entropy))) * inverse
    place = gradient + row * sizes[2] + column
    tl.store(place, value.to(gradient.dtype.element_ty), mask=column < sizes[1])
