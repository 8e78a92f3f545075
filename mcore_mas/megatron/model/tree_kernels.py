"""Attention over packed trees in three Triton kernels: the output, the gradient of queries, and of keys and values.

Segments lie depth first, so a token's subtree is one stretch behind it: query q sees key k iff k <= q < end[k], where
end[k] is the first token behind the subtree of k's segment. A tile has the rows of some queries times the heads that
share a key/value head: keys are read once for all of them, and a tile of 128 rows is only 32 tokens long where 4 heads
share. Softmax is summed block by block, as in FlashAttention-2 (arXiv 2307.08691). Every result is summed inside one
program in one order: no atomics, the same bits every time.

A tensor is a tuple (first element, stride of tokens, stride of heads); elements of a head are neighbours. `plan` is
(ends, seen, begin, masked, nearest, farthest, tokens, heads, scale · log2 e, scale), see `BlockPlan`. `shape` is
(heads of a key/value head, head_dim, the next power of 2, rows, keys of a tile, precision of float32 products).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# Triton's interpreter (3.6 to 3.9) multiplies the bit patterns of bfloat16: there, factors are widened first
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(block, kv, tokens, shape: tl.constexpr):
    """Of a tile of queries the token and the head [ROWS] of each row, and whether it exists."""
    row = tl.arange(0, shape[3])
    token = block * (shape[3] // shape[0]) + row // shape[0]
    return (
        token,
        kv * shape[0] + row % shape[0],
        (row < shape[3] // shape[0] * shape[0]) & (token < tokens),
    )


@triton.jit
def _place(x, token, head, shape: tl.constexpr):
    base, by_token, by_head = x
    row = token.to(tl.int64) * by_token + head * by_head
    return base + row[:, None] + tl.arange(0, shape[2])[None, :]


@triton.jit
def _load(x, token, head, live, shape: tl.constexpr):
    """[rows, head_dim] of a tensor; zeros where a row does not exist."""
    inside = live[:, None] & (tl.arange(0, shape[2]) < shape[1])[None, :]
    return tl.load(_place(x, token, head, shape), mask=inside, other=0.0)


@triton.jit
def _store(x, value, token, head, live, shape: tl.constexpr):
    inside = live[:, None] & (tl.arange(0, shape[2]) < shape[1])[None, :]
    place = _place(x, token, head, shape)
    tl.store(place, value.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _product(a, b, total, shape: tl.constexpr):
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=shape[5])


@triton.jit
def _keys(n, kv, keys, plan, shape: tl.constexpr):
    """The n-th block of keys in the list: their tokens, which of them exist, and what they are."""
    k, v = keys
    token = tl.load(plan[1] + n) * shape[4] + tl.arange(0, shape[4])
    live = token < plan[6]
    return token, live, _load(k, token, kv, live, shape), _load(v, token, kv, live, shape)


@triton.jit
def _scores(q, k, query, key, live, plan, mask: tl.constexpr, shape: tl.constexpr):
    """[rows, keys] of q kᵀ · scale · log2 e; minus infinity where a key is not seen."""
    scores = _product(q, tl.trans(k), None, shape) * plan[8]
    if mask:
        end = tl.load(plan[0] + key, mask=live, other=0)  # a key that does not exist ends at 0
        seen = (key[None, :] <= query[:, None]) & (query[:, None] < end[None, :])
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend(state, rows, n, kv, keys, plan, mask: tl.constexpr, shape: tl.constexpr):
    peak, total, out = state
    q, query = rows
    key, live, k, v = _keys(n, kv, keys, plan, shape)
    scores = _scores(q, k, query, key, live, plan, mask, shape)
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    out = _product(weights.to(v.dtype), v, out * shrink[:, None], shape)
    return higher, total * shrink + tl.sum(weights, 1), out


@triton.jit
def forward_kernel(q, k, v, out, lse, plan, shape: tl.constexpr):
    """`out`, and the log-sum-exp of each row in `lse` [T, heads]; programs: blocks of queries x key/value heads."""
    block, kv = tl.program_id(0), tl.program_id(1)
    query, head, live = _rows(block, kv, plan[6], shape)
    rows = (_load(q, query, head, live, shape), query)
    # the peak starts finite: a row may see nothing of its first block
    state = (
        tl.full([shape[3]], -1.0e30, tl.float32),
        tl.zeros([shape[3]], tl.float32),
        tl.zeros([shape[3], shape[2]], tl.float32),
    )
    middle = tl.load(plan[3] + block)
    for n in range(tl.load(plan[2] + block), middle):
        state = _attend(state, rows, n, kv, (k, v), plan, False, shape)
    for n in range(middle, tl.load(plan[2] + block + 1)):
        state = _attend(state, rows, n, kv, (k, v), plan, True, shape)
    peak, total, weighted = state
    total = tl.where(live, total, 1.0)  # every row that exists sees itself
    _store(out, weighted / total[:, None], query, head, live, shape)
    tl.store(
        lse + query.to(tl.int64) * plan[7] + head, (peak + tl.log2(total)) / _LOG2_E, mask=live
    )


@triton.jit
def _spread(of_q, rows, n, kv, keys, plan, mask: tl.constexpr, shape: tl.constexpr):
    q, of_out, lse, delta, query = rows
    key, live, k, v = _keys(n, kv, keys, plan, shape)
    weights = tl.exp2(_scores(q, k, query, key, live, plan, mask, shape) - lse[:, None])
    of_scores = weights * (_product(of_out, tl.trans(v), None, shape) - delta[:, None])
    return _product(of_scores.to(k.dtype), k, of_q, shape)


@triton.jit
def backward_q_kernel(q, k, v, forward, of_out, of_q, plan, shape: tl.constexpr):
    """`of_q`, and on the way delta = out · of_out of each row; `forward` is (out, lse, delta)."""
    out, lses, deltas = forward
    block, kv = tl.program_id(0), tl.program_id(1)
    query, head, live = _rows(block, kv, plan[6], shape)
    gradient = _load(of_out, query, head, live, shape)
    delta = tl.sum(_load(out, query, head, live, shape).to(tl.float32) * gradient.to(tl.float32), 1)
    place = query.to(tl.int64) * plan[7] + head
    tl.store(deltas + place, delta, mask=live)
    lse = tl.load(lses + place, mask=live, other=0.0) * _LOG2_E
    rows = (_load(q, query, head, live, shape), gradient, lse, delta, query)
    total = tl.zeros([shape[3], shape[2]], tl.float32)
    middle = tl.load(plan[3] + block)
    for n in range(tl.load(plan[2] + block), middle):
        total = _spread(total, rows, n, kv, (k, v), plan, False, shape)
    for n in range(middle, tl.load(plan[2] + block + 1)):
        total = _spread(total, rows, n, kv, (k, v), plan, True, shape)
    _store(of_q, total * plan[9], query, head, live, shape)


@triton.jit
def _gather(state, block, kv, keys, tensors, plan, mask: tl.constexpr, shape: tl.constexpr):
    of_k, of_v = state
    k, v, key, end = keys
    q, of_out, lses, deltas = tensors
    query, head, live = _rows(block, kv, plan[6], shape)
    rows, gradient = _load(q, query, head, live, shape), _load(of_out, query, head, live, shape)
    place = query.to(tl.int64) * plan[7] + head
    lse = tl.load(lses + place, mask=live, other=0.0) * _LOG2_E
    delta = tl.load(deltas + place, mask=live, other=0.0)
    # keys by rows, so that the weights go into the next product as they are, not turned over (which spills registers);
    # a row that does not exist has a gradient of 0 and adds nothing
    scores = _product(k, tl.trans(rows), None, shape) * plan[8]
    if mask:
        seen = (key[:, None] <= query[None, :]) & (query[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores - lse[None, :])
    of_v = _product(weights.to(gradient.dtype), gradient, of_v, shape)
    of_scores = weights * (_product(v, tl.trans(gradient), None, shape) - delta[None, :])
    return _product(of_scores.to(rows.dtype), rows, of_k, shape), of_v


@triton.jit
def backward_kv_kernel(q, k, v, of_out, of_k, of_v, plan, shape: tl.constexpr):
    """`of_k` and `of_v`, from the one stretch of queries that sees a block of keys; `q` comes with (lse, delta).

    Blocks of queries are those at the diagonal, those that see every key, and those where subtrees end.
    """
    queries, lses, deltas = q
    block, kv = tl.program_id(0), tl.program_id(1)
    key = block * shape[4] + tl.arange(0, shape[4])
    live = key < plan[6]
    keys = (
        _load(k, key, kv, live, shape),
        _load(v, key, kv, live, shape),
        key,
        tl.load(plan[0] + key, mask=live, other=0),
    )
    tensors = (queries, of_out, lses, deltas)
    step = shape[3] // shape[0]  # tokens of a block of queries
    start = block * shape[4] // step
    stop = tl.cdiv(tl.load(plan[5] + block), step)
    whole = tl.minimum(tl.cdiv(block * shape[4] + shape[4] - 1, step), stop)
    tail = tl.minimum(tl.maximum(tl.load(plan[4] + block) // step, whole), stop)
    zeros = tl.zeros([shape[4], shape[2]], tl.float32)
    state = (zeros, zeros)
    for n in range(whole - start + stop - tail):
        at = tl.where(n < whole - start, start + n, tail + n - (whole - start))
        state = _gather(state, at, kv, keys, tensors, plan, True, shape)
    for at in range(whole, tail):
        state = _gather(state, at, kv, keys, tensors, plan, False, shape)
    _store(of_k, state[0] * plan[9], key, kv, live, shape)
    _store(of_v, state[1], key, kv, live, shape)
