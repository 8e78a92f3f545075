"""Triton kernels between the products of layers and head: norms, SwiGLU, rotation by position, passes over logits.

And the gradient of a layer's experts, which is a product of each one's rows.
All compute in float32 whatever they read and write. In those over logits, which are read once and stay as they are,
`sizes` is (columns of this rank that are tokens, columns, stride of rows).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load(x, place, there):
    return tl.load(x + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _inverse(value, sizes, eps):
    """One over the root mean square of each row [rows, 1]."""
    return tl.rsqrt(tl.sum(value * value, 1) / sizes[1] + eps)[:, None]


@triton.jit
def norm_kernel(x, weight, out, sizes, eps, rows: tl.constexpr, width: tl.constexpr):
    """`out` = x · weight / its root mean square, of each row; `sizes` is (rows, columns, stride of `x`)."""
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    column = tl.arange(0, width)[None, :]
    there = (row < sizes[0]) & (column < sizes[1])
    value, share = (
        _load(x, row * sizes[2] + column, there),
        _load(weight, column, column < sizes[1]),
    )
    normed = value * _inverse(value, sizes, eps)
    tl.store(out + row * sizes[1] + column, (normed * share).to(out.dtype.element_ty), mask=there)


@triton.jit
def norm_gradient_kernel(
    x, weight, of_out, made, sizes, eps, rows: tl.constexpr, width: tl.constexpr
):
    """`made` is the gradient of x and, if wanted, each program's part of the weight's [programs, columns].

    A program goes through every so-and-so-many-th block of rows and adds up what the weight gets of them.
    """
    of_x, parts = made
    total = tl.zeros((rows, width), dtype=tl.float32)
    column = tl.arange(0, width)[None, :]
    share = _load(weight, column, column < sizes[1])
    for at in range(tl.program_id(0) * rows, sizes[0], tl.num_programs(0) * rows):
        row = (at + tl.arange(0, rows)).to(tl.int64)[:, None]
        there = (row < sizes[0]) & (column < sizes[1])
        # both before the first of them is summed: nothing is read ahead of a barrier that comes first
        value, slope = (
            _load(x, row * sizes[2] + column, there),
            _load(of_out, row * sizes[1] + column, there),
        )
        # y = n w, n = x r, r = (mean x² + ε)^-1/2: dx = r (w dy − n mean(w dy n)) and dw = Σ dy n
        inverse = _inverse(value, sizes, eps)
        normed, steep = value * inverse, slope * share
        gradient = inverse * (steep - normed * (tl.sum(steep * normed, 1) / sizes[1])[:, None])
        tl.store(of_x + row * sizes[1] + column, gradient.to(of_x.dtype.element_ty), mask=there)
        total += slope * normed
    if parts is not None:
        place = tl.arange(0, width)
        tl.store(
            parts + tl.program_id(0) * sizes[1] + place, tl.sum(total, 0), mask=place < sizes[1]
        )


@triton.jit
def swiglu_kernel(wide, scale, out, width, block: tl.constexpr):
    """`out` [rows, width] = silu(gate) · up of `wide` [rows, 2 width], gate first; times `scale` [rows], if given."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    gate = tl.load(wide + 2 * row * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(wide + (2 * row + 1) * width + column, mask=there, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if scale is not None:
        value *= tl.load(scale + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_gradient_kernel(wide, scale, of_out, of_wide, of_scale, width, block: tl.constexpr):
    """The gradients of `wide` [rows, 2 width] and, in parts [rows, blocks], of the scale from the product's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    gate = tl.load(wide + 2 * row * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(wide + (2 * row + 1) * width + column, mask=there, other=0.0).to(tl.float32)
    slope = tl.load(of_out + row * width + column, mask=there, other=0.0).to(tl.float32)
    # d silu(g)/dg = σ(g) (1 + g (1 − σ(g)))
    share = tl.sigmoid(gate)
    if scale is not None:
        of_rows = tl.sum(slope * gate * share * up, 0)
        tl.store(of_scale + row * tl.num_programs(1) + tl.program_id(1), of_rows)
        slope *= tl.load(scale + row)
    of_gate = slope * up * share * (1 + gate * (1 - share))
    of_up = slope * gate * share
    tl.store(of_wide + 2 * row * width + column, of_gate.to(of_wide.dtype.element_ty), mask=there)
    tl.store(
        of_wide + (2 * row + 1) * width + column, of_up.to(of_wide.dtype.element_ty), mask=there
    )


@triton.jit
def rotate_kernel(
    x, angles, out, sizes, back: tl.constexpr, heads: tl.constexpr, half: tl.constexpr
):
    """Every head's halves (a, b) of one token as (a cos − b sin, b cos + a sin), or `back`, by the opposite angles.

    `sizes` is (heads, half of their elements, strides of x by token and head, of angles by token); `heads` and `half`
    are powers of two from there on. Of a token's angles the second half repeats the first.
    """
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, heads)[:, None], tl.arange(0, half)[None, :]
    there = (head < sizes[0]) & (column < sizes[1])
    angle = tl.load(angles + token * sizes[4] + column, mask=column < sizes[1], other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if back:
        sin = -sin
    start = x + token * sizes[2] + head * sizes[3] + column
    first = tl.load(start, mask=there, other=0.0).to(tl.float32)
    second = tl.load(start + sizes[1], mask=there, other=0.0).to(tl.float32)
    place = out + (token * sizes[0] + head) * 2 * sizes[1] + column
    tl.store(place, (first * cos - second * sin).to(out.dtype.element_ty), mask=there)
    tl.store(place + sizes[1], (second * cos + first * sin).to(out.dtype.element_ty), mask=there)


@triton.jit
def add_grouped_kernel(total, left, right, ends, sizes, block: tl.constexpr, terms: tl.constexpr):
    """A tile of one expert's `total` [E, *sizes] += leftᵀ right of its rows, which end at `ends` [E].

    Each element is one program's, so sums have one order; atomic adding saves the registers that reading first takes.
    """
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    column = tl.program_id(0) * block + tl.arange(0, block)[None, :]
    token = tl.arange(0, terms)[:, None]
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group)
    if first < last:  # else there is nothing to add
        sums = tl.zeros((block, block), dtype=tl.float32)
        a_start, b_start = (
            left + first.to(tl.int64) * sizes[0],
            right + first.to(tl.int64) * sizes[1],
        )
        for at in range(first, last, terms):
            there = token < last - at
            a = tl.load(a_start + token * sizes[0] + row, mask=there & (row < sizes[0]), other=0.0)
            b = tl.load(
                b_start + token * sizes[1] + column, mask=there & (column < sizes[1]), other=0.0
            )
            a_start += terms * sizes[0]
            b_start += terms * sizes[1]
            sums = tl.dot(tl.trans(a), b, sums, input_precision="ieee")
        down = tl.trans(row)
        place = total + group * sizes[0] * sizes[1] + (down * sizes[1] + column)
        inside = (down < sizes[0]) & (column < sizes[1])
        tl.atomic_add(place, sums, mask=inside, sem="relaxed")


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
    z = (
        tl.load(logits + row * sizes[2] + column, mask=column < sizes[0], other=float("-inf"))
        * inverse
    )
    logp = z - log_z
    p = tl.exp(logp)
    logp = tl.where(p > 0, logp, 0.0)
    hit = tl.where((column == tl.load(labels + row)) & (column < sizes[0]), of_logprob, 0.0)
    value = (hit - p * (of_logprob + of_entropy * (logp + entropy))) * inverse
    place = gradient + row * sizes[2] + column
    tl.store(place, value.to(gradient.dtype.element_ty), mask=column < sizes[1])
