"""Operators of the embedded engine's decoder on a GPU, one or two Triton launches each.

Triton launches on the current device, so each operator makes its tensors' device the current one. The
operators are norms with the residual before them, SwiGLU, the rotation that fills the cache, and attention
over the cache. Each has a fake implementation, which gives torch the shape of its result without a GPU.

Letters of shapes: T tokens, H query heads, KV key and value heads, D head dimension, S rows and M
positions of the cache, B blocks of queries.
"""

import numpy as np
import torch
from torch import Tensor

_SWIGLU_BLOCK = 1024  # columns that a program computes
_TILE_KEYS = 64  # keys of a tile of attention
# Rows of a tile of queries (queries times heads of a key/value head). In float32, more would not fit
# into registers.
_PREFILL_ROWS = {torch.bfloat16: 128, torch.float32: 32}
_MIN_ROWS = 16  # smallest number of rows that Triton multiplies
_MAX_SPLITS = 32  # a program of `combine_kernel` holds the parts of all splits
# Number of programs that keeps a GPU busy in a decoding pass: two for each multiprocessor of an H100.
# It is the same on every GPU, so that sums have the same order.
_PROGRAMS = 2 * 132


@torch.library.custom_op("mcore_mas::add_norm", mutates_args=("x",))
def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to `x` in place, and return the norm of the sum (RMSNorm).

    Args:
        x: [T, hidden] float32, contiguous.
        delta: [T, hidden], contiguous; None for 0.
        dtype: type of the result.
    """
    from rollout.engines.embedded import gpu_kernels as kernels

    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = _next_power_of_two(columns)
    warps = min(16, max(1, block // 512))  # 16 columns for each thread
    with torch.cuda.device_of(x):
        kernels.add_norm_kernel[(rows,)](
            x, delta, weight, out, columns, eps, block, num_warps=warps
        )
    return out


add_norm.register_fake(lambda x, delta, weight, eps, dtype: x.new_empty(x.shape, dtype=dtype))


@torch.library.custom_op("mcore_mas::silu_and_mul", mutates_args=())
def fused_silu_and_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) · up [T, width] in `dtype`, of `gate_up` [T, 2 width], the gate first."""
    from rollout.engines.embedded import gpu_kernels as kernels

    rows, columns = gate_up.shape
    width = columns // 2
    out = torch.empty(rows, width, dtype=dtype, device=gate_up.device)
    grid = (rows, -(-width // _SWIGLU_BLOCK))
    with torch.cuda.device_of(gate_up):
        kernels.silu_and_mul_kernel[grid](gate_up, out, width, _SWIGLU_BLOCK, num_warps=4)
    return out


fused_silu_and_mul.register_fake(
    lambda gate_up, dtype: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2, dtype=dtype)
)


@torch.library.custom_op("mcore_mas::rotate_and_store", mutates_args=("keys", "values"))
def rotate_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rotation: Tensor,
    coordinates: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Tensor:
    """Write keys and values of tokens into a layer's cache, and return their queries [T, H, D].

    Queries and keys are normalized, if the model has such norms, and rotated.

    Args:
        qkv: [T, (H + 2 KV) D] projections, contiguous.
        q_norm, k_norm: [D] weights of the norms, or None.
        rotation: [M, D / 2, 2] float32, cosine and sine, both times D^-1/4. So the scores of queries
            and keys are scaled by D^-1/2.
        coordinates: [T, 2] int32, cache row and position of each token.
        keys, values: [S, KV, M, D], contiguous.
    """
    from rollout.engines.embedded import gpu_kernels as kernels

    q = _empty_queries(qkv, keys)
    kv_heads, length, head_dim = keys.shape[1:]
    sizes = (q.shape[1], kv_heads, head_dim // 2, length)
    with torch.cuda.device_of(qkv):
        kernels.rotate_and_store_kernel[(len(qkv), q.shape[1] + 2 * kv_heads)](
            qkv,
            (q_norm, k_norm),
            rotation,
            coordinates,
            q,
            (keys, values),
            sizes,
            eps,
            _next_power_of_two(head_dim // 2),
            num_warps=1,
        )
    return q


def _empty_queries(qkv: Tensor, keys: Tensor) -> Tensor:
    kv_heads = keys.shape[1]
    head_dim = keys.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return torch.empty(len(qkv), heads, head_dim, dtype=keys.dtype, device=qkv.device)


rotate_and_store.register_fake(
    lambda qkv, q_norm, k_norm, rotation, coordinates, keys, values, eps: _empty_queries(qkv, keys)
)


@torch.library.custom_op("mcore_mas::attend_to_cache", mutates_args=())
def attend_to_cache(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, tile_rows: int, splits: int
) -> Tensor:
    """Return the causal attention [T, H, D] of queries over a layer's cache.

    Args:
        q: [T, H, D] queries. Queries and keys contain the scale of their scores.
        keys, values: [S, KV, M, D], contiguous.
        blocks: [B, 4] int32: cache row, first query, number of queries, and position of the first
            query. Queries of a block have neighbouring positions.
        tile_rows: rows of a tile: at least the queries of a block times H / KV.
        splits: number of programs that share the keys of a block.
    """
    from rollout.engines.embedded import gpu_kernels as kernels

    tokens, heads, head_dim = q.shape
    kv_heads, length = keys.shape[1:3]
    padded_dim = max(_MIN_ROWS, _next_power_of_two(head_dim))
    out = torch.empty_like(q)
    part_values = None
    part_statistics = None
    if splits > 1:
        part_values = q.new_empty(splits, tokens, heads, head_dim, dtype=torch.float32)
        part_statistics = q.new_empty(2, splits, tokens, heads, dtype=torch.float32)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # matters to float32 only
    with torch.cuda.device_of(q):
        kernels.attention_kernel[len(blocks), kv_heads, splits](
            q,
            (keys, values),
            blocks,
            out,
            (part_values, part_statistics),
            (tokens, heads, kv_heads, head_dim, length),
            (heads // kv_heads, padded_dim, tile_rows, _TILE_KEYS, precision),
            num_warps=8 if tile_rows >= 128 else 4,
            num_stages=2,
        )
        if splits > 1:
            kernels.combine_kernel[(tokens * heads,)](
                (part_values, part_statistics),
                out,
                (splits, tokens * heads, head_dim),
                _next_power_of_two(splits),
                padded_dim,
                num_warps=1,
            )
    return out


attend_to_cache.register_fake(
    lambda q, keys, values, blocks, tile_rows, splits: torch.empty_like(q)
)


def query_blocks(
    rows: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    heads_per_kv: int,
    dtype: torch.dtype,
) -> tuple[np.ndarray, int]:
    """Cut spans of queries into blocks of one tile.

    Args:
        rows: cache row of each span.
        starts: position of the first query of each span.
        sizes: number of queries of each span.
        heads_per_kv: query heads of a key/value head.
        dtype: type of the queries.

    Returns:
        Blocks [B, 4] for `attend_to_cache`, those with the most keys first, and the rows of a tile.
    """
    tile_rows = max(_PREFILL_ROWS[dtype], _next_power_of_two(heads_per_kv))
    block_queries = tile_rows // heads_per_kv
    blocks = []
    first_query = 0
    for row, start, size in zip(rows.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        for first in range(0, size, block_queries):
            count = min(block_queries, size - first)
            blocks.append((row, first_query + first, count, start + first))
        first_query += size
    # A program's time grows with its keys; the longest come first, so that none is left at the end.
    blocks.sort(key=lambda block: block[3], reverse=True)
    return np.array(blocks, dtype=np.int32), tile_rows


def decoding_tile_rows(heads_per_kv: int) -> int:
    """Return the rows of a tile with one query."""
    return max(_MIN_ROWS, _next_power_of_two(heads_per_kv))


def decoding_splits(tokens: int, kv_heads: int, max_length: int) -> int:
    """Return the number of programs that share the keys of one query and key/value head.

    The whole pass then has at most `_PROGRAMS` programs, or one for each query and key/value head if
    these are more. No query gets more programs than `max_length` keys have tiles.

    Args:
        tokens: number of queries of the pass, one for each row.
        kv_heads: number of key/value heads.
        max_length: maximum number of keys of a query.
    """
    limit = min(_MAX_SPLITS, -(-max_length // _TILE_KEYS))
    return max(1, min(limit, _PROGRAMS // (tokens * kv_heads)))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
