"""MLP with a SwiGLU activation (arXiv 2002.05202), for dense layers and for experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import use_triton
from mcore_mas.megatron.model.cpu_ops import CPUSwiGLU
from mcore_mas.megatron.model.layer_ops import swiglu, write_swiglu
from mcore_mas.megatron.model.recompute import free_until_backward


class GatedMLP(MLP):
    """Megatron's MLP with gate and up projection, SwiGLU and no biases."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        """Build the module as `MLP` does."""
        super().__init__(config, *args, **kwargs)
        if config.fp8 and config.recompute_granularity == "selective":
            # Transformer Engine would save the projection's input in FP8, and recomputation would
            # free nothing.
            from megatron.core.extensions.transformer_engine import set_save_original_input

            set_save_original_input(self.linear_fc2)

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        """Return (output, None) for hidden states [..., hidden]; the output has their shape."""
        gate_and_up, _bias = self.linear_fc1(hidden_states)
        return gated_projection(
            self.config, gate_and_up, row_scale=None, projection=self.linear_fc2
        )


def gated_projection(
    config: TransformerConfig,
    gate_and_up: Tensor,
    *,
    row_scale: Tensor | None,
    projection: Callable[[Tensor], Any],
) -> Any:
    """Apply SwiGLU and the projection that follows it.

    With selective recomputation the product of SwiGLU is freed after the projection, and computed
    again in the backward pass.

    Args:
        gate_and_up: [..., 2 f], see `apply_swiglu`.
        row_scale: [...], see `apply_swiglu`.
        projection: returns (output, bias) for the product [..., f] of SwiGLU.

    Returns:
        (output, bias) of `projection`.
    """
    if config.recompute_granularity != "selective":
        return projection(apply_swiglu(gate_and_up, row_scale))

    if use_triton(gate_and_up.device):
        product = swiglu(gate_and_up, row_scale)
        result = projection(product)
        write = partial(_write_product, gate_and_up.detach(), row_scale)
        free_until_backward(product, write, reader_output=result[0])
        return result

    checkpoint = CheckpointWithoutOutput()
    result = projection(checkpoint.checkpoint(apply_swiglu, gate_and_up, row_scale))
    checkpoint.discard_output_and_register_recompute(result[0])
    return result


def _write_product(gate_and_up: Tensor, row_scale: Tensor | None, out: Tensor) -> None:
    """Write the product of SwiGLU to `out`, which is the last argument so that `partial` can bind the others."""
    write_swiglu(out, gate_and_up, row_scale)


def apply_swiglu(gate_and_up: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """Compute SwiGLU, silu(gate) · up, times a factor of each row.

    Args:
        gate_and_up: [..., 2 f], the gate first.
        row_scale: [...] factor of each row; None: 1.

    Returns:
        [..., f]
    """
    out: Tensor
    if use_triton(gate_and_up.device):
        out = swiglu(gate_and_up, row_scale)
        return out

    out = CPUSwiGLU.apply(gate_and_up)
    if row_scale is None:
        return out
    return (out * row_scale.unsqueeze(-1)).to(out.dtype)
