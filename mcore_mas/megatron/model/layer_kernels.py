"""Triton kernels between a layer's products: SwiGLU and its gradient, and the rotation of queries and keys.

All compute in float32 whatever they read and write.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(wide, out, width, block: tl.constexpr):
    """`out` [rows, width] = silu(gate) · up of `wide` [rows, 2 width], gate first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    gate = tl.load(wide + 2 * row * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(wide + (2 * row + 1) * width + column, mask=there, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_gradient_kernel(wide, of_out, of_wide, width, block: tl.constexpr):
    """The gradient [rows, 2 width] of `wide` from that of the product [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < width
    gate = tl.load(wide + 2 * row * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(wide + (2 * row + 1) * width + column, mask=there, other=0.0).to(tl.float32)
    slope = tl.load(of_out + row * width + column, mask=there, other=0.0).to(tl.float32)
    # d silu(g)/dg = σ(g) (1 + g (1 − σ(g)))
    share = tl.sigmoid(gate)
    of_gate = slope * up * share * (1 + gate * (1 - share))
    of_up = slope * gate * share
    tl.store(of_wide + 2 * row * width + column, of_gate.to(of_wide.dtype.element_ty), mask=there)
    tl.store(of_wide + (2 * row + 1) * width + column, of_up.to(of_wide.dtype.element_ty), mask=there)


@triton.jit
def rotate_kernel(x, angles, out, sizes, back: tl.constexpr, heads: tl.constexpr, half: tl.constexpr):
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
