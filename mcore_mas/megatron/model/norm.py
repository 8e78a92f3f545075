"""Root-mean-square norm of layers (arXiv 1910.07467), and the residual addition before it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import use_triton
from mcore_mas.megatron.model.cpu_ops import CPUNorm
from mcore_mas.megatron.model.layer_ops import KernelNorm, KernelSumAndNorm, write_norm
from mcore_mas.megatron.model.recompute import free_until_backward


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm.

    The weight is marked, so that under sequence parallelism Megatron sums its gradient over the ranks.

    Attributes:
        exact: True if norms on a CPU have the bits of the embedded engine's exact mode.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self.exact = config.deterministic_mode

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., hidden_size] along its last dimension."""
        out: Tensor
        if use_triton(x.device):
            out = KernelNorm.apply(x, self.weight, self.eps)
        elif x.device.type == "cpu" and not self.exact:
            out = CPUNorm.apply(x, self.weight, self.eps)
        else:
            # The embedded engine's exact mode calls F.rms_norm, too.
            out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out


class ResidualNorm(RMSNorm):
    """Norm of hidden states on a GPU, with the residual addition before it in the same kernel.

    `norm(x, residual)` returns the sum and computes its norm, which the next call, `norm(sum)`,
    returns. `ResidualAddition` makes the first call and Megatron's layer the second. Both go through
    `Module.__call__`, whose hooks wait until the distributed optimizer has gathered the weight.

    Attributes:
        frees_output: True if the output is freed until the backward pass, which computes it again;
            see `free_output_until_backward_of`.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        """Build the module as `RMSNorm` does."""
        super().__init__(config, *args, **kwargs)
        self.frees_output = False
        self._sum: Tensor | None = None
        self._norm_of_sum: Tensor | None = None
        self._last_call: tuple[Tensor, Tensor] | None = None  # input and output

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of x [..., hidden_size], or with a residual the sum of both."""
        if residual is not None:
            total: Tensor
            total, self._norm_of_sum = KernelSumAndNorm.apply(x, residual, self.weight, self.eps)
            self._sum = total
            return total

        norm_of_sum = self._norm_of_sum if x is self._sum else None
        self._sum = None
        self._norm_of_sum = None
        out = super().forward(x) if norm_of_sum is None else norm_of_sum
        if self.frees_output:
            self._last_call = x.detach(), out
        return out

    def free_output_until_backward_of(self, reader_output: Tensor) -> None:
        """Free this norm's last output until the backward pass of the attention or MLP that has read it.

        Do nothing unless `frees_output` is set.

        Args:
            reader_output: output of the attention or MLP.
        """
        if self._last_call is not None:
            x, out = self._last_call
            self._last_call = None
            free_until_backward(out, partial(self._write, x), reader_output=reader_output)

    def _write(self, x: Tensor, out: Tensor) -> None:
        """Write the norm of x to `out`."""
        write_norm(out.flatten(0, -2), x.flatten(0, -2), self.weight, self.eps)


class ResidualAddition:
    """Bias-dropout-add of a layer on a GPU, without bias and dropout.

    The kernel of the norm that follows it computes the sum.
    """

    def __init__(self, previous: ResidualNorm, following: ResidualNorm | None) -> None:
        """Connect the norms.

        Args:
            previous: norm whose output the attention or MLP reads.
            following: norm of the sum; None to compute the sum alone.
        """
        self._previous = previous
        self._following = following

    def __call__(self, training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
        """Return a function of (output and bias, residual, dropout probability)."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, None], residual: Tensor, _: float) -> Tensor:
        """Return the sum of the residual and the output of the attention or MLP.

        Also free the output of the previous norm until the backward pass, if its `frees_output` is set.
        """
        output, _bias = output_and_bias
        self._previous.free_output_until_backward_of(output)
        if self._following is None:
            return output + residual
        total: Tensor = self._following(output, residual)
        return total


class HeadNorm(RMSNorm):
    """Norm of query or key heads that `FusedSelfAttention` computes; a call returns the weight.

    The weight is read through a call, so that the forward hooks of the distributed optimizer first
    wait until all of it has been gathered.
    """

    def forward(self) -> Tensor:  # type: ignore[override]
        """Return the weight [head_dim]."""
        return self.weight
