"""Root-mean-square norm of layers (arXiv 1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import use_triton
from mcore_mas.megatron.model.cpu_ops import CPUNorm
from mcore_mas.megatron.model.layer_ops import KernelNorm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm.

    Its weight is marked, so that Megatron reduces its gradient under sequence parallelism.
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
        """Normalise x [..., hidden_size] along its last dimension."""
        out: Tensor
        if use_triton(x.device):
            out = KernelNorm.apply(x, self.weight, self.eps)
        elif x.device.type == "cpu" and not self.exact:
            out = CPUNorm.apply(x, self.weight, self.eps)
        else:
            out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out


class HeadNorm(RMSNorm):
    """Norm of query or key heads that `FusedSelfAttention` computes; a call returns the weight.

    The weight is read through a call, so that the forward hooks of the distributed optimizer first
    wait until all of it has been gathered.
    """

    def forward(self) -> Tensor:  # type: ignore[override]
        """Return the weight [head_dim]."""
        return self.weight
