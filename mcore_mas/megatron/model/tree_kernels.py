"""Triton kernels of attention over packed trees: output, and gradients of queries, keys and values.

Segments lie depth first, so the subtree of a token's segment is one range of tokens that follows
the token: query q attends to key k if k <= q < end[k], where end[k] is the first token after the
subtree of k's segment. Softmax is computed block by block, as in FlashAttention-2 (arXiv
2307.08691). Each result is summed by one program in a fixed order, without atomic operations, so
that it has the same bits every time.

A tile of queries has one row for each token and each head that shares a key/value head. Keys are
thus loaded once for all these heads; a tile of 128 rows has only 32 tokens if 4 heads share a
key/value head. A row is not used if its token is beyond the T tokens, or if it is left over because
the number of heads that share a key/value head does not divide the number of rows.

Three kinds of arguments are tuples:

- A tensor is (pointer, stride of tokens, stride of heads). The elements of a head are neighbours.
- `plan` describes which queries attend to which keys, see `BlockPlan`; the constants below name its
  elements.
- `shape` has compile-time constants; the constants below name its elements.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# Elements of `plan`.
_ENDS = tl.constexpr(0)
_KEY_BLOCKS = tl.constexpr(1)
_KEY_BLOCK_OFFSETS = tl.constexpr(2)
_FIRST_MASKED = tl.constexpr(3)
_SMALLEST_END = tl.constexpr(4)
_LARGEST_END = tl.constexpr(5)
_TOKENS = tl.constexpr(6)
_HEADS = tl.constexpr(7)
_SCALE_TIMES_LOG2_E = tl.constexpr(8)  # weights are powers of 2 of the scores
_SCALE = tl.constexpr(9)  # softmax scale

# Elements of `shape`.
_GROUP = tl.constexpr(0)  # heads that share a key/value head
_HEAD_DIM = tl.constexpr(1)
_PADDED_DIM = tl.constexpr(2)  # head dimension, padded to a power of two of at least 16
_ROWS = tl.constexpr(3)  # of a tile of queries
_KEYS = tl.constexpr(4)  # of a tile of keys
_PRECISION = tl.constexpr(5)  # of products of float32 factors

# Triton's interpreter (3.6 to 3.9) multiplies the bit patterns of bfloat16 numbers. Factors are
# therefore converted to float32 there.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _query_rows(block, kv_head, tokens, shape: tl.constexpr):
    """Return the token and the head of each row [rows] of a tile of queries, and True if it is used."""
    row = tl.arange(0, shape[_ROWS])
    tokens_per_block = shape[_ROWS] // shape[_GROUP]
    token = block * tokens_per_block + row // shape[_GROUP]
    head = kv_head * shape[_GROUP] + row % shape[_GROUP]
    is_used = (row < tokens_per_block * shape[_GROUP]) & (token < tokens)
    return token, head, is_used


@triton.jit
def _block_rows(x, block, kv_head, shape: tl.constexpr):
    """Return a pointer to the first row of a tile of queries, and the offset [rows] of each row.

    The offsets are the same for all blocks, and take fewer registers than a pointer to each row.
    """
    base, token_stride, head_stride = x
    first_token = block * (shape[_ROWS] // shape[_GROUP])
    first_row = first_token.to(tl.int64) * token_stride + kv_head * shape[_GROUP] * head_stride
    row = tl.arange(0, shape[_ROWS])
    offset = row // shape[_GROUP] * token_stride + row % shape[_GROUP] * head_stride
    return base + first_row, offset


@triton.jit
def _load_block(x, block, kv_head, is_used, shape: tl.constexpr):
    """Load a tile of queries [rows, padded head_dim], with zeros in rows that are not used."""
    first_row, offset = _block_rows(x, block, kv_head, shape)
    column = tl.arange(0, shape[_PADDED_DIM])
    mask = is_used[:, None] & (column < shape[_HEAD_DIM])[None, :]
    return tl.load(first_row + (offset[:, None] + column[None, :]), mask=mask, other=0.0)


@triton.jit
def _load_block_numbers(x, block, kv_head, is_used, plan, shape: tl.constexpr):
    """Load one number for each row of a tile of queries [rows]; `x` points to [T, heads]."""
    first_row, offset = _block_rows((x, plan[_HEADS], 1), block, kv_head, shape)
    return tl.load(first_row + offset, mask=is_used, other=0.0)


@triton.jit
def _pointers(x, token, head, shape: tl.constexpr):
    """Return pointers to the elements of a tile [rows, padded head_dim] of a tensor."""
    base, token_stride, head_stride = x
    row = token.to(tl.int64) * token_stride + head * head_stride
    return base + row[:, None] + tl.arange(0, shape[_PADDED_DIM])[None, :]


@triton.jit
def _load(x, token, head, is_used, shape: tl.constexpr):
    """Load a tile [rows, padded head_dim] of a tensor, with zeros in rows that are not used."""
    mask = is_used[:, None] & (tl.arange(0, shape[_PADDED_DIM]) < shape[_HEAD_DIM])[None, :]
    return tl.load(_pointers(x, token, head, shape), mask=mask, other=0.0)


@triton.jit
def _store(x, value, token, head, is_used, shape: tl.constexpr):
    """Store a tile [rows, padded head_dim] in a tensor, without the rows that are not used."""
    mask = is_used[:, None] & (tl.arange(0, shape[_PADDED_DIM]) < shape[_HEAD_DIM])[None, :]
    pointers = _pointers(x, token, head, shape)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _product(a, b, total, shape: tl.constexpr):
    """Return the matrix product a b, added to `total` if it is not None."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=shape[_PRECISION])


@triton.jit
def _load_key_block(index, kv_head, keys_and_values, plan, shape: tl.constexpr):
    """Load a block of keys; `index` is its index in the list of key blocks.

    Returns:
        The token of each key, True for each token that exists, the keys, and the values.
    """
    k, v = keys_and_values
    block = tl.load(plan[_KEY_BLOCKS] + index)
    token = block * shape[_KEYS] + tl.arange(0, shape[_KEYS])
    exists = token < plan[_TOKENS]
    keys = _load(k, token, kv_head, exists, shape)
    values = _load(v, token, kv_head, exists, shape)
    return token, exists, keys, values


@triton.jit
def _scores(
    queries,
    keys,
    query_token,
    key_token,
    key_exists,
    plan,
    masked: tl.constexpr,
    shape: tl.constexpr,
):
    """Return q kᵀ · scale · log2 e [rows, keys]; with `masked`, −∞ where a query does not attend."""
    scores = _product(queries, tl.trans(keys), None, shape) * plan[_SCALE_TIMES_LOG2_E]
    if masked:
        # A token that does not exist ends at 0, so no query attends to it.
        end = tl.load(plan[_ENDS] + key_token, mask=key_exists, other=0)
        attends = (key_token[None, :] <= query_token[:, None]) & (
            query_token[:, None] < end[None, :]
        )
        scores = tl.where(attends, scores, float("-inf"))
    return scores


@triton.jit
def _add_key_block(
    state, tile, index, kv_head, keys_and_values, plan, masked: tl.constexpr, shape: tl.constexpr
):
    """Add a block of keys to the softmax of a tile of queries.

    Args:
        state: largest score (log2), sum of the weights, and weighted values of each row.
        tile: queries, and their tokens.
        index: position of the block in the plan's list of key blocks.
        kv_head: key/value head.
        masked: True if some queries of the tile do not attend to all keys of the block.
    """
    peak, total, weighted_values = state
    queries, query_token = tile
    key_token, key_exists, keys, values = _load_key_block(
        index, kv_head, keys_and_values, plan, shape
    )
    scores = _scores(queries, keys, query_token, key_token, key_exists, plan, masked, shape)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    rescale = tl.exp2(peak - new_peak)
    weighted_values = _product(
        weights.to(values.dtype), values, weighted_values * rescale[:, None], shape
    )
    return new_peak, total * rescale + tl.sum(weights, 1), weighted_values


@triton.jit
def forward_kernel(q, k, v, out, lses, plan, shape: tl.constexpr):
    """Compute the output, and the log-sum-exp of each row.

    Each program computes a block of queries for one key/value head.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, key/value heads, head_dim].
        out: [T, heads, head_dim].
        lses: pointer to [T, heads] float32.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    token, head, is_used = _query_rows(block, kv_head, plan[_TOKENS], shape)
    tile = (_load(q, token, head, is_used, shape), token)
    # The largest score starts at a finite number, because a row may attend to no key of its first
    # block.
    state = (
        tl.full([shape[_ROWS]], -1.0e30, tl.float32),
        tl.zeros([shape[_ROWS]], tl.float32),
        tl.zeros([shape[_ROWS], shape[_PADDED_DIM]], tl.float32),
    )
    first_masked = tl.load(plan[_FIRST_MASKED] + block)
    for index in range(tl.load(plan[_KEY_BLOCK_OFFSETS] + block), first_masked):
        state = _add_key_block(state, tile, index, kv_head, (k, v), plan, False, shape)
    for index in range(first_masked, tl.load(plan[_KEY_BLOCK_OFFSETS] + block + 1)):
        state = _add_key_block(state, tile, index, kv_head, (k, v), plan, True, shape)

    peak, total, weighted_values = state
    # A used row attends to itself at least, so only rows that are not used can have a total of 0.
    total = tl.where(is_used, total, 1.0)
    _store(out, weighted_values / total[:, None], token, head, is_used, shape)
    tl.store(
        lses + token.to(tl.int64) * plan[_HEADS] + head,
        (peak + tl.log2(total)) / _LOG2_E,
        mask=is_used,
    )


@triton.jit
def _add_query_gradient(
    grad_q, tile, index, kv_head, keys_and_values, plan, masked: tl.constexpr, shape: tl.constexpr
):
    """Add a key block's contribution to the gradient of a tile of queries.

    The sum lacks the softmax scale: the calling kernel multiplies the sum by it before storing it.

    Args:
        grad_q: sum so far.
        tile: queries, gradient of the output, log-sum-exps (log2), deltas (see
            `backward_q_kernel`), and tokens.
        index: position of the block in the plan's list of key blocks.
        kv_head: key/value head.
        masked: True if some queries of the tile do not attend to all keys of the block.
    """
    queries, grad_out, lse, delta, query_token = tile
    key_token, key_exists, keys, values = _load_key_block(
        index, kv_head, keys_and_values, plan, shape
    )
    scores = _scores(queries, keys, query_token, key_token, key_exists, plan, masked, shape)
    weights = tl.exp2(scores - lse[:, None])
    grad_weights = _product(grad_out, tl.trans(values), None, shape)
    grad_scores = weights * (grad_weights - delta[:, None])
    return _product(grad_scores.to(keys.dtype), keys, grad_q, shape)


@triton.jit
def backward_q_kernel(q, k, v, out, lses, deltas, grad_out, grad_q, plan, shape: tl.constexpr):
    """Compute the gradient of the queries, and the deltas for `backward_kv_kernel`.

    The delta of a row is the inner product of its output and the gradient of the output. Each program
    computes a block of queries for one key/value head.

    Args:
        q, k, v, out, lses: arguments of `forward_kernel`.
        deltas: pointer to [T, heads] float32, which the kernel writes.
        grad_out: gradient of the output.
        grad_q: gradient of `q`, which the kernel writes.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    token, head, is_used = _query_rows(block, kv_head, plan[_TOKENS], shape)
    grad_out_tile = _load(grad_out, token, head, is_used, shape)
    out_tile = _load(out, token, head, is_used, shape)
    delta = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    offset = token.to(tl.int64) * plan[_HEADS] + head
    tl.store(deltas + offset, delta, mask=is_used)
    lse = tl.load(lses + offset, mask=is_used, other=0.0) * _LOG2_E
    tile = (_load(q, token, head, is_used, shape), grad_out_tile, lse, delta, token)
    total = tl.zeros([shape[_ROWS], shape[_PADDED_DIM]], tl.float32)
    first_masked = tl.load(plan[_FIRST_MASKED] + block)
    for index in range(tl.load(plan[_KEY_BLOCK_OFFSETS] + block), first_masked):
        total = _add_query_gradient(total, tile, index, kv_head, (k, v), plan, False, shape)
    for index in range(first_masked, tl.load(plan[_KEY_BLOCK_OFFSETS] + block + 1)):
        total = _add_query_gradient(total, tile, index, kv_head, (k, v), plan, True, shape)
    _store(grad_q, total * plan[_SCALE], token, head, is_used, shape)


@triton.jit
def _add_key_gradients(
    state, block, kv_head, key_tile, query_tensors, plan, masked: tl.constexpr, shape: tl.constexpr
):
    """Add the contribution of a block of queries to the gradients of a tile of keys and values.

    Args:
        state: gradients of the keys and of the values so far. The gradients of the keys lack the
            softmax scale: the calling kernel multiplies them by it before storing them.
        block: index of the block of queries.
        kv_head: key/value head.
        key_tile: keys, values, the token of each key, and its `end` (see the module).
        query_tensors: `q`, `grad_out`, `lses` and `deltas` of `backward_kv_kernel`.
        masked: True if some queries of the block do not attend to all keys of the tile.
    """
    grad_k, grad_v = state
    keys, values, key_token, end = key_tile
    q, grad_out, lses, deltas = query_tensors
    token, _, is_used = _query_rows(block, kv_head, plan[_TOKENS], shape)
    queries = _load_block(q, block, kv_head, is_used, shape)
    grad_out_tile = _load_block(grad_out, block, kv_head, is_used, shape)
    lse = _load_block_numbers(lses, block, kv_head, is_used, plan, shape) * _LOG2_E

    # The scores have keys as rows, so that the weights enter the next product without being
    # transposed, which would spill registers. A query row that is not used has an output gradient
    # and a delta of 0, so it adds nothing.
    scores = _product(keys, tl.trans(queries), None, shape) * plan[_SCALE_TIMES_LOG2_E]
    if masked:
        attends = (key_token[:, None] <= token[None, :]) & (token[None, :] < end[:, None])
        scores = tl.where(attends, scores, float("-inf"))
    weights = tl.exp2(scores - lse[None, :])
    grad_v = _product(weights.to(grad_out_tile.dtype), grad_out_tile, grad_v, shape)
    grad_weights = _product(values, tl.trans(grad_out_tile), None, shape)
    # If the deltas were loaded before the products, registers would be spilled.
    delta = _load_block_numbers(deltas, block, kv_head, is_used, plan, shape)
    grad_scores = weights * (grad_weights - delta[None, :])
    return _product(grad_scores.to(queries.dtype), queries, grad_k, shape), grad_v


@triton.jit
def backward_kv_kernel(q, k, v, lses, deltas, grad_out, grad_k, grad_v, plan, shape: tl.constexpr):
    """Compute the gradients of keys and values; each program computes a block of one key/value head.

    The queries that attend to a block of keys are one range. Its first blocks are on the diagonal
    and need the mask, the following ones attend to every key, and subtrees end in the last ones,
    which need the mask again.

    Args:
        q, k, v, lses, grad_out: arguments of `backward_q_kernel`.
        deltas: pointer to the deltas that `backward_q_kernel` has written.
        grad_k, grad_v: gradients of `k` and `v`, which the kernel writes.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    key_token = block * shape[_KEYS] + tl.arange(0, shape[_KEYS])
    exists = key_token < plan[_TOKENS]
    key_tile = (
        _load(k, key_token, kv_head, exists, shape),
        _load(v, key_token, kv_head, exists, shape),
        key_token,
        tl.load(plan[_ENDS] + key_token, mask=exists, other=0),
    )
    query_tensors = (q, grad_out, lses, deltas)

    # Blocks of queries: masked [start, unmasked_start), unmasked [unmasked_start, unmasked_stop),
    # and masked [unmasked_stop, stop).
    query_tokens = shape[_ROWS] // shape[_GROUP]
    start = block * shape[_KEYS] // query_tokens
    stop = tl.cdiv(tl.load(plan[_LARGEST_END] + block), query_tokens)
    last_key = block * shape[_KEYS] + shape[_KEYS] - 1
    unmasked_start = tl.minimum(tl.cdiv(last_key, query_tokens), stop)
    first_ending = tl.load(plan[_SMALLEST_END] + block) // query_tokens
    unmasked_stop = tl.minimum(tl.maximum(first_ending, unmasked_start), stop)

    zeros = tl.zeros([shape[_KEYS], shape[_PADDED_DIM]], tl.float32)
    state = (zeros, zeros)
    # One loop goes through both masked ranges, so that the kernel has the masked code only once.
    diagonal_blocks = unmasked_start - start
    for number in range(diagonal_blocks + stop - unmasked_stop):
        is_diagonal = number < diagonal_blocks
        query_block = tl.where(
            is_diagonal, start + number, unmasked_stop + number - diagonal_blocks
        )
        state = _add_key_gradients(
            state, query_block, kv_head, key_tile, query_tensors, plan, True, shape
        )
    for query_block in range(unmasked_start, unmasked_stop):
        state = _add_key_gradients(
            state, query_block, kv_head, key_tile, query_tensors, plan, False, shape
        )
    _store(grad_k, state[0] * plan[_SCALE], key_token, kv_head, exists, shape)
    _store(grad_v, state[1], key_token, kv_head, exists, shape)
