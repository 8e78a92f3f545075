"""Matrix products of the embedded engine's decoder, and its mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.models.architecture import Experts
from rollout.models.fused_weights import DecoderWeights, LayerWeights

# Inductor's linear layer, where torch is built with oneDNN. For few rows it takes up to a third
# less time than MKL's product, which copies the weight into blocks in each call. The overhead of a
# call is 15 us larger.
one_dnn_linear: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
# Smallest float32 weight, in elements, for which a copy in oneDNN's blocks saves time. In bfloat16
# the copy saves time for every size.
_MIN_BLOCKED_ELEMENTS = 1 << 18
# For more rows than this, torch multiplies: oneDNN compiles kernels for each number of rows, which
# takes about a millisecond each.
_MAX_BLOCKED_ROWS = 256

# Function that returns True if the processor has instructions for products in bfloat16 (AVX512-BF16).
# With them a product is twice as fast as in float32. Without them it takes 3 to 6 times as long
# (measured with oneDNN restricted to older instructions).
has_bf16: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


class BlockedWeights:
    """Matrix products with a decoder's weights.

    On a CPU with oneDNN, it holds copies of weights in oneDNN's block layout, which are multiplied
    faster.
    """

    def __init__(self, weights: DecoderWeights | None = None) -> None:
        """Copy the weights for which a copy saves time, at about 1.5 ns an element.

        These are the large matrices in float32, and all matrices in bfloat16, except those of experts.

        Args:
            weights: weights of the decoder; None: nothing is copied.
        """
        self._copies: dict[Tensor, Tensor] = {}
        if weights is None or one_dnn_linear is None or weights.storage.device.type != "cpu":
            return
        is_float32 = weights.storage.dtype == torch.float32
        min_elements = _MIN_BLOCKED_ELEMENTS if is_float32 else 0
        matrices = [weights.head]
        for layer in weights.layers:
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        for matrix in matrices:
            if matrix.dim() == 2 and matrix.numel() >= min_elements:
                self._copies[matrix] = torch.ops.mkldnn._reorder_linear_weight(matrix)

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x weightᵀ + bias of `x` [N, inputs], multiplied in the type of `weight`.

        The result is in the type of `x`.
        """
        if x.dtype != weight.dtype:
            product = self.multiply(x.to(weight.dtype), weight).to(x.dtype)
            return product if bias is None else product.add_(bias)
        blocked = self._copies.get(weight)
        if blocked is None or one_dnn_linear is None or len(x) > _MAX_BLOCKED_ROWS:
            return F.linear(x, weight, bias)
        return one_dnn_linear(x, blocked, bias, "none", [], "")

    def multiply_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return residual + x weightᵀ of `residual` [N, outputs] and `x` [N, inputs]."""
        if weight not in self._copies and weight.dtype == residual.dtype:
            return torch.addmm(residual, x, weight.t())
        return self.multiply(x, weight).add_(residual)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up [..., width] of `gate_up` [..., 2 width], the gate first."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])


def add_experts(
    multiply: Callable[[Tensor, Tensor], Tensor],
    experts: Experts,
    layer: LayerWeights,
    x: Tensor,
    normed: Tensor,
) -> Tensor:
    """Add the output of each token's experts to `x` [N, hidden] in place.

    Args:
        multiply: matrix product of the decoder; a function of an input and a weight, which returns
            input weightᵀ.
        experts: sizes of the mixture, and how many experts a token has.
        layer: weights of the layer.
        x: residual stream, to which the output is added.
        normed: input of the experts [N, hidden], float32.

    Returns:
        The experts of each token, int64 [N, k].
    """
    assert layer.router is not None
    # The router computes in the type of `normed`, float32: in bfloat16, rounding could change which
    # experts are chosen.
    probabilities = multiply(normed, layer.router.to(normed.dtype)).softmax(-1)
    shares, chosen = probabilities.topk(experts.per_token, dim=-1)
    if experts.normalised:
        shares /= shares.sum(-1, keepdim=True)
    flat_shares = shares.flatten()
    # Indices in `flat_shares`, token · k + choice, of the (token, choice) pairs sorted by expert.
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=experts.count).tolist()
    for expert, pairs in enumerate(order.split(sizes)):
        if len(pairs) == 0:
            continue
        tokens = pairs // experts.per_token
        wide = silu_and_mul(multiply(normed[tokens], layer.gate_up[expert]))
        output = multiply(wide, layer.down[expert])
        x.index_add_(0, tokens, output.mul_(flat_shares[pairs, None]))
    return chosen
