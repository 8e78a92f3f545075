"""Triton kernels of the embedded engine's decoder on a GPU; `gpu_ops.py` launches them.

All of them compute in float32, whatever types they read and write, but the factors of attention's
products keep the type of the cache. Several sizes come in one tuple `sizes`, and compile-time constants
in one tuple `shape`; each kernel names their elements.

The cache of a layer is [S, KV, M, D]: rows, key/value heads, positions and head dimension.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# Triton's interpreter (3.6 to 3.9) multiplies the bit patterns of bfloat16 numbers. Factors are
# therefore converted to float32 there.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(1.4426950408889634)
# A score below all others. It is finite, because the difference of two infinities is NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def add_norm_kernel(x, delta, weight, out, columns, eps, block: tl.constexpr):
    """Add `delta` to a row of `x`, and normalize the row by its root mean square (RMSNorm).

    Args:
        x: [rows, columns] float32; gets x + delta.
        delta: [rows, columns], or None for 0.
        weight: [columns].
        out: [rows, columns]; gets x / rms(x) · weight.
        eps: is added to the mean square.
        block: the next power of two of the columns.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    mask = column < columns
    value = tl.load(x + row * columns + column, mask=mask, other=0.0)
    if delta is not None:
        change = tl.load(delta + row * columns + column, mask=mask, other=0.0)
        value += change.to(tl.float32)
        tl.store(x + row * columns + column, value, mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    normed = value * inverse_rms * factor
    tl.store(out + row * columns + column, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(gate_up, out, width, block: tl.constexpr):
    """Compute silu(gate) · up for `block` columns of a row.

    Args:
        gate_up: [rows, 2 width], the gate first.
        out: [rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    gate = tl.load(gate_up + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate_and_store_kernel(
    qkv, norms, rotation, coordinates, q, cache, sizes, eps, padded_half: tl.constexpr
):
    """Normalize and rotate one head of a token; store a key or value in the cache.

    Neighbouring elements (a, b) of a head are a pair, which becomes (a cos − b sin, a sin + b cos).

    Args:
        qkv: [T, heads + 2 kv_heads, D] projections of T tokens.
        norms: weights [D] of the norms of queries and keys; None without these norms.
        rotation: [M, D / 2, 2] float32, the cosine and sine of each position and pair, both times
            D^-1/4.
        coordinates: [T, 2] int32, cache row and position of each token.
        q: [T, heads, D] gets the queries.
        cache: keys and values of the layer [S, KV, M, D].
        sizes: heads, kv_heads, D / 2, M.
        padded_half: the next power of two of D / 2.
    """
    heads, kv_heads, half, length = sizes
    q_norm, k_norm = norms
    keys, values = cache
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(coordinates + 2 * token).to(tl.int64)
    position = tl.load(coordinates + 2 * token + 1).to(tl.int64)
    pair = tl.arange(0, padded_half)
    mask = pair < half
    source = qkv + (token * (heads + 2 * kv_heads) + head) * 2 * half + 2 * pair
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)

    is_value = head >= heads + kv_heads
    if not is_value:
        if q_norm is not None:
            mean_square = tl.sum(first * first + second * second, 0) / (2 * half)
            inverse_rms = tl.rsqrt(mean_square + eps)
            first_q = tl.load(q_norm + 2 * pair, mask=mask, other=0.0).to(tl.float32)
            first_k = tl.load(k_norm + 2 * pair, mask=mask, other=0.0).to(tl.float32)
            second_q = tl.load(q_norm + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
            second_k = tl.load(k_norm + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
            first *= inverse_rms * tl.where(head < heads, first_q, first_k)
            second *= inverse_rms * tl.where(head < heads, second_q, second_k)
        angle = rotation + position * 2 * half + 2 * pair
        cos = tl.load(angle, mask=mask, other=0.0)
        sin = tl.load(angle + 1, mask=mask, other=0.0)
        turned = first * cos - second * sin
        second = first * sin + second * cos
        first = turned

    element_type = q.dtype.element_ty
    first = first.to(element_type)
    second = second.to(element_type)
    if head < heads:
        target = q + (token * heads + head) * 2 * half + 2 * pair
        tl.store(target, first, mask=mask)
        tl.store(target + 1, second, mask=mask)
    else:
        kv_head = (head - heads) % kv_heads
        offset = ((row * kv_heads + kv_head) * length + position) * 2 * half + 2 * pair
        if is_value:
            tl.store(values + offset, first, mask=mask)
            tl.store(values + offset + 1, second, mask=mask)
        else:
            tl.store(keys + offset, first, mask=mask)
            tl.store(keys + offset + 1, second, mask=mask)


@triton.jit
def _product(a, b, total, precision: tl.constexpr):
    """Return the matrix product a b, added to `total` if it is not None."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=precision)


@triton.jit
def attention_kernel(q, cache, blocks, out, parts, sizes, shape: tl.constexpr):
    """Attend with a block of neighbouring queries of one cache row, for the heads of a key/value head.

    A query sees the keys up to its own position. The queries' tile has one row for each query and
    head, so a key is loaded once for all of them. Softmax is computed tile by tile of keys, as in
    FlashAttention-2 (arXiv 2307.08691). With several splits each program attends to a part of the
    keys, and `combine_kernel` adds the parts up (Flash-Decoding).

    Args:
        q: [T, heads, D] queries. Queries and keys contain the scale of their scores.
        cache: keys and values of the layer [S, KV, M, D].
        blocks: [B, 4] int32: cache row, first query (of T), number of queries, and position of the
            first query.
        out: [T, heads, D] gets the attention, if there is one split.
        parts: with several splits, unnormalized attention [splits, T, heads, D] float32, and its
            largest score (times log2 e) and sum of exponentials [2, splits, T, heads]; else None.
        sizes: T, heads, kv_heads, D, M.
        shape: query heads of a key/value head, D rounded up to a power of two that is at least 16,
            rows of a tile, keys of a tile, and precision of products.
    """
    tokens, heads, kv_heads, head_dim, length = sizes
    keys, values = cache
    part_values, part_statistics = parts
    heads_per_kv: tl.constexpr = shape[0]
    padded_dim: tl.constexpr = shape[1]
    tile_rows: tl.constexpr = shape[2]
    tile_keys: tl.constexpr = shape[3]
    precision: tl.constexpr = shape[4]

    block = blocks + 4 * tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    cache_row = tl.load(block).to(tl.int64)
    first_query = tl.load(block + 1)
    query_count = tl.load(block + 2)
    position = tl.load(block + 3)

    tile_row = tl.arange(0, tile_rows)
    query = tile_row // heads_per_kv
    head = kv_head * heads_per_kv + tile_row % heads_per_kv
    is_used = query < query_count
    query_position = position + query
    column = tl.arange(0, padded_dim)
    is_column = column < head_dim
    query_row = (first_query + query).to(tl.int64) * heads + head
    element = query_row[:, None] * head_dim + column[None, :]
    element_mask = is_used[:, None] & is_column[None, :]
    q_tile = tl.load(q + element, mask=element_mask, other=0.0)

    # The splits share the tiles of keys that the last query sees.
    visible_keys = position + query_count
    split_keys = tl.cdiv(tl.cdiv(visible_keys, tile_keys), splits) * tile_keys
    first_key = split * split_keys
    end = tl.minimum(visible_keys, first_key + split_keys)
    cache_offset = (cache_row * kv_heads + kv_head) * length * head_dim

    largest = tl.full((tile_rows,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((tile_rows,), dtype=tl.float32)
    attended = tl.zeros((tile_rows, padded_dim), dtype=tl.float32)
    for tile_start in range(first_key, end, tile_keys):
        key = tile_start + tl.arange(0, tile_keys)
        key_offset = cache_offset + key[:, None].to(tl.int64) * head_dim + column[None, :]
        key_mask = (key < end)[:, None] & is_column[None, :]
        k_tile = tl.load(keys + key_offset, mask=key_mask, other=0.0)
        v_tile = tl.load(values + key_offset, mask=key_mask, other=0.0)
        scores = _product(q_tile, tl.trans(k_tile), None, precision) * _LOG2_E
        is_seen = (key[None, :] <= query_position[:, None]) & (key < end)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        attended = _product(
            weights.to(v_tile.dtype), v_tile, attended * rescale[:, None], precision
        )
        largest = new_largest

    if part_values is None:
        normalized = attended / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + element, normalized.to(out.dtype.element_ty), mask=element_mask)
    else:
        first_row = split.to(tl.int64) * tokens * heads
        tl.store(part_values + first_row * head_dim + element, attended, mask=element_mask)
        statistic = part_statistics + first_row + query_row
        tl.store(statistic, largest, mask=is_used)
        row_count = splits.to(tl.int64) * tokens * heads
        tl.store(statistic + row_count, total, mask=is_used)


@triton.jit
def combine_kernel(parts, out, sizes, padded_splits: tl.constexpr, padded_dim: tl.constexpr):
    """Add up the parts of the attention of one query and head; see `attention_kernel`.

    Args:
        parts: values [splits, T, heads, D] and statistics [2, splits, T, heads].
        out: [T, heads, D] gets the attention.
        sizes: splits, T · heads, D.
        padded_splits: the next power of two of the splits.
        padded_dim: as in the `shape` of `attention_kernel`.
    """
    part_values, part_statistics = parts
    splits, query_rows, head_dim = sizes
    query_row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, padded_splits).to(tl.int64)
    column = tl.arange(0, padded_dim)
    is_split = split < splits
    is_column = column < head_dim
    statistic = part_statistics + split * query_rows + query_row
    largest = tl.load(statistic, mask=is_split, other=_LOWEST)
    total = tl.load(statistic + splits.to(tl.int64) * query_rows, mask=is_split, other=0.0)
    weight = tl.exp2(largest - tl.max(largest, 0))
    row = split * query_rows + query_row
    mask = is_split[:, None] & is_column[None, :]
    attended = tl.load(
        part_values + row[:, None] * head_dim + column[None, :], mask=mask, other=0.0
    )
    denominator = tl.sum(total * weight, 0)
    combined = tl.sum(attended * weight[:, None], 0) / tl.where(denominator > 0, denominator, 1.0)
    target = out + query_row * head_dim + column
    tl.store(target, combined.to(out.dtype.element_ty), mask=is_column)
