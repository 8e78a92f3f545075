"""Norms, linear layers, and linear layers of several experts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, check_shape, quantized


def _mark_shard(parameter: Parameter, dim: int) -> None:
    """Mark a parameter as a shard of tensor parallelism, as Megatron's own layers do."""
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        setattr(parameter, name, value)


class _Product(torch.autograd.Function):
    """`apply(x, weight, fuse, recipe)`: x weightᵀ, whose gradient may be added to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuse: bool, recipe: Recipe | None) -> Tensor:
        check_shape(x, recipe)
        check_shape(weight, recipe)
        ctx.weight = weight
        ctx.fuse = fuse
        ctx.recipe = recipe
        ctx.save_for_backward(x)
        return quantized(x, recipe) @ quantized(weight, recipe).t()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        recipe = ctx.recipe
        grad_out = quantized(grad_out, recipe, backward=True)
        grad_x = grad_out @ quantized(weight, recipe)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        grad_rows = grad_out.flatten(0, -2)
        x_rows = quantized(x, recipe).flatten(0, -2)
        if not ctx.fuse:
            return grad_x, grad_rows.t() @ x_rows, None, None

        weight.main_grad += grad_rows.t().float() @ x_rows.float()
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad_x, None, None, None
        weight.grad_added_to_main_grad = True
        # Megatron's hook needs a gradient, and reads no number of it.
        return grad_x, torch.empty_like(weight), None, None


class _Norm(torch.autograd.Function):
    """`apply(x, weight, eps)`: root-mean-square norm, of which only the input is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.rms_norm(x, weight.shape, weight, ctx.eps)
        return *torch.autograd.grad(out, (x, weight), grad), None


class _Gather(torch.autograd.Function):
    """Tokens of all ranks; in the backward pass each rank gets the summed gradients of its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """This rank's tokens of the sum over ranks; the backward pass gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class _Sum(torch.autograd.Function):
    """`apply(x, group, in_backward)`: sum over ranks in one direction, identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_backward: bool) -> Tensor:
        ctx.group = group
        ctx.in_backward = in_backward
        return x.view_as(x) if in_backward else _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_sum(grad, ctx.group) if ctx.in_backward else grad), None, None


def _sum(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    return _sum(x, group).chunk(group.size())[group.rank()].clone()


class TransformerEngineBaseModule(torch.nn.Module):
    """Layer with an extra state, which is always empty here."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        delay_wgrad_compute: bool = False,
        name: str | None = None,
    ) -> None:
        """Take the arguments of all layers with weights; `_add_weight` then makes the weights."""
        super().__init__()
        self.use_bias = bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode = parallel_mode
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        if parallel_mode == "column":
            out_features //= self.tp_size
        elif parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features = in_features
        self.out_features = out_features
        self._init_method = init_method
        self._placement = {"dtype": params_dtype, "device": device}

    def get_extra_state(self) -> Tensor:
        """Return an empty tensor; with delayed scaling, Transformer Engine returns scales."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept an empty state."""
        assert state is None or not state.numel()

    def _add_weight(self, name: str) -> Parameter:
        """Add this rank's share of a weight."""
        shape = (self.out_features, self.in_features)
        weight = _new_parameter(shape, self._init_method, **self._placement)
        self.register_parameter(name, weight)
        return weight

    def _mark(self, weights: Sequence[Parameter], biases: Sequence[Parameter]) -> None:
        for weight in weights:
            _mark_shard(weight, 1 if self.parallel_mode == "row" else 0)
        for bias in biases:
            if self.parallel_mode == "row":
                bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif self.parallel_mode == "column":
                _mark_shard(bias, 0)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        recipe = FP8GlobalStateManager.recipe
        out: Tensor = _Product.apply(x, weight, self.fuse_wgrad_accumulation, recipe)
        return out

    def _multiply_in_parallel(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply, and communicate with the other ranks of tensor parallelism."""
        if self.tp_size == 1 or self.parallel_mode is None:
            return self._multiply(x, weight)
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                return self._multiply(_Gather.apply(x, self.tp_group), weight)
            return self._multiply(_Sum.apply(x, self.tp_group, True), weight)
        out = self._multiply(x, weight)
        if self.sequence_parallel:
            split: Tensor = _ReduceScatter.apply(out, self.tp_group)
            return split
        total: Tensor = _Sum.apply(out, self.tp_group, False)
        return total


def _new_parameter(
    shape: tuple[int, ...],
    init: Callable[[Tensor], Any] | None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> Parameter:
    parameter = Parameter(torch.empty(shape, dtype=dtype, device=device))
    with torch.no_grad():
        (init or torch.nn.init.normal_)(parameter)
    return parameter


class Linear(TransformerEngineBaseModule):
    """Linear layer."""

    weight: Parameter
    bias: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parameters_split: Any = None,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(in_features, out_features, **layer)
        self.save_original_input = save_original_input
        weight = self._add_weight("weight")
        if self.use_bias:
            shape = (self.out_features,)
            self.bias = _new_parameter(shape, torch.nn.init.zeros_, **self._placement)
            self._mark([weight], [self.bias])
        else:
            self.bias = torch.empty(0, **self._placement)
            self._mark([weight], [])

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        """Return the product, with the bias added."""
        out = self._multiply_in_parallel(inp, self.weight)
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    """Norm and linear layer; the norm's weight is `layer_norm_weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        **layer: Any,
    ) -> None:
        assert (
            normalization == "RMSNorm" and not zero_centered_gamma and not return_layernorm_output
        )
        super().__init__(in_features, out_features, **layer)
        self.eps = eps
        self.layer_norm_weight = _new_parameter(
            (in_features,), torch.nn.init.ones_, **self._placement
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        """Return the product with the normalised input."""
        return super().forward(_Norm.apply(inp, self.layer_norm_weight, self.eps))


class GroupedLinear(TransformerEngineBaseModule):
    """Linear layers of several experts, with the parameters weight0, weight1, ..."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        ub_name: str | None = None,
        save_original_input: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(in_features, out_features, **layer)
        assert not self.use_bias
        assert self.tp_size == 1 or self.parallel_mode is None, "the dispatcher communicates"
        self.num_gemms = num_gemms
        self.save_original_input = save_original_input
        self._mark([self._add_weight(f"weight{expert}") for expert in range(num_gemms)], [])

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Return the product of each expert's rows with its weight."""
        assert len(m_splits) == self.num_gemms
        weights = [self.get_parameter(f"weight{expert}") for expert in range(self.num_gemms)]
        rows = inp.split(m_splits)
        return torch.cat([self._multiply(*pair) for pair in zip(rows, weights, strict=True)])


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        size = hidden_size or normalized_shape or 0
        self.weight = _new_parameter((size,), torch.nn.init.ones_, params_dtype, device)
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        """Normalise along the last dimension."""
        normed: Tensor = _Norm.apply(inp, self.weight, self.eps)
        return normed

    def get_extra_state(self) -> Tensor:
        """Return an empty tensor, as operations of Transformer Engine do."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept any state."""


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm, which no supported model has."""


class Fp8Padding(torch.nn.Module):
    """Padding of each expert's rows with zeros, to a multiple that FP8 needs."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """Return the padded rows, and the number of each expert."""
        multiple = self.align_size or 16
        padded = [-(-count // multiple) * multiple for count in m_splits]
        parts = [
            F.pad(rows, (0, 0, 0, target - len(rows)))
            for rows, target in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(Fp8Padding):
    """Removal of the rows that `Fp8Padding` added."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        """Return the rows without those that were added."""
        multiple = self.align_size or 16
        padded = [-(-count // multiple) * multiple for count in m_splits]
        pairs = zip(inp.split(padded), m_splits, strict=True)
        return torch.cat([rows[:count] for rows, count in pairs])
