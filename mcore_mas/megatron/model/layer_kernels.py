"""Triton kernels of norms, SwiGLU, queries and keys, expert weight gradients and head logits.

They are launched by `layer_ops.py`, `head_ops.py` and `experts.py`. All of them compute in float32,
whatever types they read and write. Several sizes come in one tuple `sizes`, whose elements each kernel
names.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load(x, offset, mask):
    """Load elements of x as float32, and 0 where the mask is False."""
    return tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _inverse_rms(value, columns, eps):
    """Return 1 / √(mean value² + eps) of each row, [rows, 1]."""
    return tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    results,
    sizes,
    eps,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Normalize rows by their root mean square (RMSNorm, arXiv 1910.07467).

    A program computes `block_rows` rows. `block_columns` is the number of columns, rounded up to a
    power of two.

    Args:
        x: [rows, columns].
        residual: [rows, columns], contiguous; added to `x` first. None: `x` itself is normalized.
        weight: [columns].
        results: (sum, norm), both [rows, columns] and contiguous. The sum x + residual is rounded
            to the type of its tensor before it is normalized; its tensor is None without a
            residual. The norm is multiplied by the weight.
        sizes: rows, columns, and the stride of the rows of `x`.
        eps: number that is added to the mean square.
    """
    total, out = results
    rows, columns, x_stride = sizes
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
    column = tl.arange(0, block_columns)[None, :]
    mask = (row < rows) & (column < columns)
    value = _load(x, row * x_stride + column, mask)
    if residual is not None:
        value += _load(residual, row * columns + column, mask)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    factor = _load(weight, column, column < columns)
    normed = value * _inverse_rms(value, columns, eps)
    tl.store(out + row * columns + column, (normed * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_gradient_kernel(
    x,
    weight,
    gradients,
    results,
    sizes,
    eps,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Compute the gradients of a norm's input and weight.

    Program p computes the blocks of rows p, p + programs, p + 2 · programs, and so on.

    Args:
        gradients: gradient of the norm's output; and gradient of its input by other operations, or
            None. Both are [rows, columns] and contiguous.
        results: gradient of `x`, contiguous; each program's part of the gradient of the weight
            [programs, columns] float32, or None if the weight is frozen.
        x, weight, sizes, eps, block_rows, block_columns: arguments of `norm_kernel`.
    """
    grad_out, other_grad_x = gradients
    grad_x, weight_parts = results
    rows, columns, x_stride = sizes
    grad_weight = tl.zeros((block_rows, block_columns), dtype=tl.float32)
    column = tl.arange(0, block_columns)[None, :]
    factor = _load(weight, column, column < columns)
    start = tl.program_id(0) * block_rows
    step = tl.num_programs(0) * block_rows
    for first_row in range(start, rows, step):
        row = (first_row + tl.arange(0, block_rows)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        # The loads come before the first sum over a row: the sum has a barrier, and loads behind a
        # barrier are not started ahead of it.
        value = _load(x, row * x_stride + column, mask)
        grad = _load(grad_out, row * columns + column, mask)
        if other_grad_x is not None:
            other_grad = _load(other_grad_x, row * columns + column, mask)

        # y = n w, n = x r, r = (mean x² + ε)^-1/2: dx = r (w dy − n mean(w dy n)) and dw = Σ dy n
        inverse = _inverse_rms(value, columns, eps)
        normed = value * inverse
        grad_normed = grad * factor
        mean = (tl.sum(grad_normed * normed, 1) / columns)[:, None]
        grad_value = inverse * (grad_normed - normed * mean)
        if other_grad_x is not None:
            grad_value += other_grad
        target = grad_x + row * columns + column
        tl.store(target, grad_value.to(grad_x.dtype.element_ty), mask=mask)
        grad_weight += grad * normed
    if weight_parts is not None:
        column_index = tl.arange(0, block_columns)
        tl.store(
            weight_parts + tl.program_id(0) * columns + column_index,
            tl.sum(grad_weight, 0),
            mask=column_index < columns,
        )


@triton.jit
def swiglu_kernel(gate_and_up, scale, out, width, block: tl.constexpr):
    """Compute SwiGLU, silu(gate) · up · scale, of `block` columns of a row (arXiv 2002.05202).

    Args:
        gate_and_up: [rows, 2 width], the gate first.
        scale: [rows] float32, or None for 1.
        out: [rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    gate = tl.load(gate_and_up + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if scale is not None:
        value *= tl.load(scale + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_gradient_kernel(
    gate_and_up, scale, grad_out, grad_gate_and_up, scale_parts, width, block: tl.constexpr
):
    """Compute the gradients of SwiGLU's input and scale, of `block` columns of a row.

    Args:
        gate_and_up, scale, width: arguments of `swiglu_kernel`.
        grad_out: [rows, width].
        grad_gate_and_up: [rows, 2 width].
        scale_parts: [rows, blocks of columns] float32, each block's part of the gradient of
            `scale`; not written if there is no scale.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    gate = tl.load(gate_and_up + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row * width + column, mask=mask, other=0.0).to(tl.float32)
    # d silu(g)/dg = σ(g) (1 + g (1 − σ(g)))
    sigmoid = tl.sigmoid(gate)
    if scale is not None:
        grad_scale = tl.sum(grad * gate * sigmoid * up, 0)
        tl.store(scale_parts + row * tl.num_programs(1) + tl.program_id(1), grad_scale)
        grad *= tl.load(scale + row)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    result_type = grad_gate_and_up.dtype.element_ty
    tl.store(grad_gate_and_up + 2 * row * width + column, grad_gate.to(result_type), mask=mask)
    tl.store(grad_gate_and_up + (2 * row + 1) * width + column, grad_up.to(result_type), mask=mask)


@triton.jit
def _packed_heads(sizes: tl.constexpr, padded_heads: tl.constexpr):
    """Return indices and masks, [padded heads, 1] each, of the heads of a packed projection.

    For each key/value head, a token has a group of query heads, one key head and one value head, in
    this order.

    Args:
        sizes: number of query heads that share a key/value head, kv_heads, and others.
        padded_heads: number of heads, padded to a power of two; the padding is False in all masks.

    Returns:
        head: index among all heads of the token.
        is_query, is_key, is_value: masks of the three kinds of heads.
        query_head: index among the token's queries, if the head is a query.
        kv_head: index of the key/value head that the head belongs to.
    """
    group: tl.constexpr = sizes[0]
    kv_heads: tl.constexpr = sizes[1]
    head = tl.arange(0, padded_heads)[:, None]
    kv_head = head // (group + 2)
    index_in_group = head % (group + 2)
    exists = kv_head < kv_heads
    is_query = exists & (index_in_group < group)
    is_key = exists & (index_in_group == group)
    is_value = exists & (index_in_group == group + 1)
    query_head = kv_head * group + index_in_group
    return head, is_query, is_key, is_value, query_head, kv_head


@triton.jit
def _load_halves(x, offset, mask, half: tl.constexpr):
    """Load both halves of heads as float32, and 0 where the mask is False."""
    return _load(x, offset, mask), _load(x, offset + half, mask)


@triton.jit
def _store_halves(x, offset, first, second, mask, half: tl.constexpr):
    tl.store(x + offset, first.to(x.dtype.element_ty), mask=mask)
    tl.store(x + offset + half, second.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _head_norm_weights(weights, is_query, column, in_head, half: tl.constexpr):
    """Return both halves of each head's norm weight: the queries' if `is_query`, else the keys'."""
    query_weight, key_weight = weights
    query_first, query_second = _load_halves(query_weight, column, in_head, half)
    key_first, key_second = _load_halves(key_weight, column, in_head, half)
    return tl.where(is_query, query_first, key_first), tl.where(is_query, query_second, key_second)


@triton.jit
def _head_inverse_rms(first, second, half: tl.constexpr, eps):
    """Return `_inverse_rms` of heads [heads, 1], given by their halves [heads, half]."""
    sum_of_squares = tl.sum(first * first + second * second, 1)[:, None]
    return tl.rsqrt(sum_of_squares / (2 * half) + eps)


@triton.jit
def _store_sums(target, value, is_summed, in_half):
    """Store the sum [half] of the rows of `value` [heads, half] for which `is_summed` is True."""
    tl.store(target, tl.sum(tl.where(is_summed, value, 0.0), 0), mask=in_half)


@triton.jit
def queries_and_keys_kernel(
    packed,
    weights,
    angles,
    results,
    strides,
    eps,
    sizes: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_half: tl.constexpr,
):
    """Normalize the queries and keys of a token, and rotate them by its angles.

    The halves (a, b) of a head become (a cos − b sin, b cos + a sin). The padded sizes are the next
    powers of two.

    Args:
        packed: [tokens, kv_heads (group + 2) 2 half], the group of queries, the key and the value of
            each key/value head.
        weights: weights of the norms of queries and keys, [2 half] each; None: no norm.
        angles: [tokens, 2 half] float32, of which the second half repeats the first.
        results: queries [tokens, kv_heads group, 2 half] and keys [tokens, kv_heads, 2 half].
        strides: strides of the tokens of `packed` and of `angles`.
        eps: number that is added to the mean square.
        sizes: group, kv_heads, half.
    """
    group: tl.constexpr = sizes[0]
    kv_heads: tl.constexpr = sizes[1]
    half: tl.constexpr = sizes[2]
    queries, keys = results
    token = tl.program_id(0).to(tl.int64)
    head, is_query, is_key, _, query_head, kv_head = _packed_heads(sizes, padded_heads)
    column = tl.arange(0, padded_half)[None, :]
    in_head = column < half
    is_rotated = (is_query | is_key) & in_head
    offset = token * strides[0] + head * 2 * half + column
    first, second = _load_halves(packed, offset, is_rotated, half)
    if weights is not None:
        inverse = _head_inverse_rms(first, second, half, eps)
        weight_first, weight_second = _head_norm_weights(weights, is_query, column, in_head, half)
        first = first * inverse * weight_first
        second = second * inverse * weight_second
    angle = tl.load(angles + token * strides[1] + column, mask=in_head, other=0.0)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    query_offset = (token * kv_heads * group + query_head) * 2 * half + column
    _store_halves(queries, query_offset, rotated_first, rotated_second, is_query & in_head, half)
    key_offset = (token * kv_heads + kv_head) * 2 * half + column
    _store_halves(keys, key_offset, rotated_first, rotated_second, is_key & in_head, half)


@triton.jit
def queries_and_keys_gradient_kernel(
    packed,
    weights,
    angles,
    gradients,
    results,
    tokens_and_strides,
    eps,
    sizes: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_half: tl.constexpr,
):
    """Compute the gradients of a packed projection and of the norms' weights.

    Program p computes the tokens p, p + programs, p + 2 · programs, and so on.

    Args:
        packed: argument of `queries_and_keys_kernel`; not read, and may be None, without norms.
        weights, angles, eps, sizes: arguments of `queries_and_keys_kernel`.
        gradients: gradients of queries and keys, in the shapes of `results` of
            `queries_and_keys_kernel`, and of values [tokens, kv_heads, 2 half]; each contiguous.
        results: gradient of `packed`, contiguous; and each program's part of the gradients of the
            weights of queries and keys [programs, 2, 2 half] float32, or None if they are frozen.
        tokens_and_strides: number of tokens; strides of the tokens of `packed` and of `angles`.
        padded_heads, padded_half: arguments of `queries_and_keys_kernel`.
    """
    group: tl.constexpr = sizes[0]
    kv_heads: tl.constexpr = sizes[1]
    half: tl.constexpr = sizes[2]
    grad_queries, grad_keys, grad_values = gradients
    grad_packed, weight_parts = results
    tokens, packed_stride, angle_stride = tokens_and_strides
    head, is_query, is_key, is_value, query_head, kv_head = _packed_heads(sizes, padded_heads)
    column = tl.arange(0, padded_half)[None, :]
    in_head = column < half
    exists = (is_query | is_key | is_value) & in_head
    if weights is not None:
        weight_first, weight_second = _head_norm_weights(weights, is_query, column, in_head, half)
        grad_weight_first = tl.zeros((padded_heads, padded_half), dtype=tl.float32)
        grad_weight_second = tl.zeros((padded_heads, padded_half), dtype=tl.float32)
    first_token = tl.program_id(0).to(tl.int64)
    for token in range(first_token, tokens, tl.num_programs(0)):
        query_offset = (token * kv_heads * group + query_head) * 2 * half + column
        key_offset = (token * kv_heads + kv_head) * 2 * half + column
        grad_query_first, grad_query_second = _load_halves(
            grad_queries, query_offset, is_query & in_head, half
        )
        grad_key_first, grad_key_second = _load_halves(
            grad_keys, key_offset, is_key & in_head, half
        )
        grad_value_first, grad_value_second = _load_halves(
            grad_values, key_offset, is_value & in_head, half
        )
        angle = tl.load(angles + token * angle_stride + column, mask=in_head, other=0.0)
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        # A head is a query, a key or a value, so at most one of the two terms of a sum is not 0.
        grad_rotated_first = grad_query_first + grad_key_first
        grad_rotated_second = grad_query_second + grad_key_second
        # The gradient is rotated by the opposite angles.
        grad_first = grad_rotated_first * cos + grad_rotated_second * sin
        grad_second = grad_rotated_second * cos - grad_rotated_first * sin
        if weights is not None:
            # The gradient of a norm's output becomes that of its input, as in `norm_gradient_kernel`.
            offset = token * packed_stride + head * 2 * half + column
            first, second = _load_halves(packed, offset, (is_query | is_key) & in_head, half)
            inverse = _head_inverse_rms(first, second, half, eps)
            normed_first = first * inverse
            normed_second = second * inverse
            grad_weight_first += grad_first * normed_first
            grad_weight_second += grad_second * normed_second
            grad_normed_first = grad_first * weight_first
            grad_normed_second = grad_second * weight_second
            products = grad_normed_first * normed_first + grad_normed_second * normed_second
            mean = tl.sum(products, 1)[:, None] / (2 * half)
            grad_first = inverse * (grad_normed_first - normed_first * mean)
            grad_second = inverse * (grad_normed_second - normed_second * mean)
        target = (token * kv_heads * (group + 2) + head) * 2 * half + column
        # Values are neither normalized nor rotated.
        grad_first = tl.where(is_value, grad_value_first, grad_first)
        grad_second = tl.where(is_value, grad_value_second, grad_second)
        _store_halves(grad_packed, target, grad_first, grad_second, exists, half)
    if weight_parts is not None:
        in_half = tl.arange(0, padded_half) < half
        query_part = weight_parts + tl.program_id(0) * 4 * half + tl.arange(0, padded_half)
        key_part = query_part + 2 * half
        _store_sums(query_part, grad_weight_first, is_query, in_half)
        _store_sums(query_part + half, grad_weight_second, is_query, in_half)
        _store_sums(key_part, grad_weight_first, is_key, in_half)
        _store_sums(key_part + half, grad_weight_second, is_key, in_half)


@triton.jit
def add_grouped_kernel(total, left, right, ends, sizes, block: tl.constexpr, terms: tl.constexpr):
    """Add leftᵀ · right of each expert's rows to that expert's `total`.

    A program computes a tile [block, block] of one expert's total, and sums `terms` rows at a time.
    No other program adds to the tile, so sums always have the same order. Adding is atomic all the
    same, because loading the tile first would take more registers.

    Args:
        total: [experts, left columns, right columns] float32.
        left: [rows, left columns], sorted by expert.
        right: [rows, right columns], sorted by expert.
        ends: [experts] first row after those of each expert.
        sizes: left columns, right columns.
    """
    left_columns, right_columns = sizes
    expert = tl.program_id(2).to(tl.int64)
    left_column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    right_column = tl.program_id(0) * block + tl.arange(0, block)[None, :]
    term = tl.arange(0, terms)[:, None]
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if first < end:
        sums = tl.zeros((block, block), dtype=tl.float32)
        left_rows = left + first.to(tl.int64) * left_columns
        right_rows = right + first.to(tl.int64) * right_columns
        for row in range(first, end, terms):
            is_row = term < end - row
            left_mask = is_row & (left_column < left_columns)
            left_tile = tl.load(
                left_rows + term * left_columns + left_column, mask=left_mask, other=0.0
            )
            right_mask = is_row & (right_column < right_columns)
            right_tile = tl.load(
                right_rows + term * right_columns + right_column, mask=right_mask, other=0.0
            )
            left_rows += terms * left_columns
            right_rows += terms * right_columns
            sums = tl.dot(tl.trans(left_tile), right_tile, sums, input_precision="ieee")
        total_row = tl.trans(left_column)
        expert_total = total + expert * left_columns * right_columns
        tile = expert_total + (total_row * right_columns + right_column)
        mask = (total_row < left_columns) & (right_column < right_columns)
        tl.atomic_add(tile, sums, mask=mask, sem="relaxed")


@triton.jit
def head_statistics_kernel(logits, labels, temperatures, statistics, sizes, block: tl.constexpr):
    """Compute the softmax statistics of a row of logits in one pass, `block` columns at a time.

    Args:
        logits: [rows, columns with padding] float32.
        labels: [rows] column of each row's label; out of range if another rank holds it.
        temperatures: [rows].
        statistics: [4, rows] float32, of z = logits / temperature: the largest z, Σ e^(z − largest),
            Σ z e^(z − largest), and the label's z, or 0 if the label belongs to another rank.
        sizes: this rank's columns without padding, with padding, and the row stride of `logits`.
    """
    columns, _, row_stride = sizes
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    inverse_temperature = 1.0 / tl.load(temperatures + row)
    row_logits = logits + row * row_stride
    peak = -1.0e30
    sum_of_exponentials = 0.0
    weighted_sum = 0.0
    for first_column in range(0, columns, block):
        column = first_column + tl.arange(0, block)
        logit = tl.load(row_logits + column, mask=column < columns, other=float("-inf"))
        z = logit * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(z, 0))
        exponentials = tl.exp(z - new_peak)
        rescale = tl.exp(peak - new_peak)
        sum_of_exponentials = sum_of_exponentials * rescale + tl.sum(exponentials, 0)
        # Columns beyond the last one have z = −∞ and an exponential of 0, whose product would be NaN.
        weighted = tl.where(exponentials > 0, exponentials * z, 0.0)
        weighted_sum = weighted_sum * rescale + tl.sum(weighted, 0)
        peak = new_peak
    label = tl.load(labels + row)
    is_local = (label >= 0) & (label < columns)
    tl.store(statistics + row, peak)
    tl.store(statistics + rows + row, sum_of_exponentials)
    tl.store(statistics + 2 * rows + row, weighted_sum)
    label_target = statistics + 3 * rows + row
    label_logit = tl.load(row_logits + label, mask=is_local, other=0.0)
    tl.store(label_target, label_logit * inverse_temperature)


@triton.jit
def head_gradient_kernel(logits, labels, row_values, gradient, sizes, block: tl.constexpr):
    """Compute the gradient of `block` logits of a row.

    Args:
        logits, labels, sizes: arguments of `head_statistics_kernel`.
        row_values: [5, rows] float32: temperatures, log Z, entropies, and the gradients of the
            log-probabilities and of the entropies.
        gradient: gradient of the logits, with the strides of `logits`.
    """
    # dH/dz_j = −p_j (log p_j + H); d log p_l/dz_j = [j = l] − p_j
    columns, padded_columns, row_stride = sizes
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inverse_temperature = 1.0 / tl.load(row_values + row)
    log_z = tl.load(row_values + rows + row)
    entropy = tl.load(row_values + 2 * rows + row)
    grad_logprob = tl.load(row_values + 3 * rows + row)
    grad_entropy = tl.load(row_values + 4 * rows + row)
    logit = tl.load(logits + row * row_stride + column, mask=column < columns, other=float("-inf"))
    logprob = logit * inverse_temperature - log_z
    probability = tl.exp(logprob)
    logprob = tl.where(probability > 0, logprob, 0.0)
    is_label = (column == tl.load(labels + row)) & (column < columns)
    grad_label = tl.where(is_label, grad_logprob, 0.0)
    grad_z = grad_label - probability * (grad_logprob + grad_entropy * (logprob + entropy))
    target = gradient + row * row_stride + column
    grad_logit = grad_z * inverse_temperature
    tl.store(target, grad_logit.to(gradient.dtype.element_ty), mask=column < padded_columns)
