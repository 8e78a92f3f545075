"""Experts without Transformer Engine: linear layers that hold all experts of a layer, and their dispatcher.

Without Transformer Engine, Megatron computes one expert after the other, once the host knows how
many tokens each has. Here the weights of a layer's experts are stacked. On a GPU, one launch of
torch's grouped product multiplies the tokens of all experts by their weights, and one launch of a
Triton kernel adds the gradients of all these weights to Megatron's float32 buffer. Tokens are sorted
by expert without the host (`SortedDispatcher`). On a CPU the experts are multiplied one by one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.main_grad import add_product, mark_grad_as_added
from mcore_mas.megatron.model.linear import linear_product
from mcore_mas.megatron.model.mlp import gated_projection
from rollout.models.batch_invariant import row_product

# Groups of rows that are sorted by expert. A tensor [E] int32 has the end index of each group; all
# experts are then multiplied in one launch on the GPU. A list has the sizes of the groups, which are
# multiplied one after the other: on a CPU, and on a GPU if the grouped product does not take the rows.
Groups = Tensor | list[int]

# torch's grouped product takes rows whose length is a multiple of this number of elements.
_ROW_MULTIPLE = 8

# Gradient kernel: rows and columns of a gradient's tile, rows of bfloat16 factors that are summed in an
# iteration, and warps.
_TILE_SIZE = 128
_ROWS_PER_ITERATION = 64
_WARPS = 8


@torch.library.custom_op("mcore_mas::add_grouped", mutates_args={"total"})
def add_grouped(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add the product leftᵀ right of each expert's rows to that expert's `total`, in float32.

    Args:
        total: [E, left columns, right columns] float32, changed in place.
        left: [R, left columns], sorted by expert.
        right: [R, right columns], sorted by expert.
        ends: [E] int32, end index of each expert's rows.
    """
    from mcore_mas.megatron.model.layer_kernels import add_grouped_kernel

    experts, left_columns, right_columns = total.shape
    grid = (-(-right_columns // _TILE_SIZE), -(-left_columns // _TILE_SIZE), experts)
    # Half as many rows of float32 take the same shared memory as rows of bfloat16, of 2-byte elements.
    rows_per_iteration = 2 * _ROWS_PER_ITERATION // left.element_size()
    sizes = (left_columns, right_columns)
    add_grouped_kernel[grid](
        total, left, right, ends, sizes, _TILE_SIZE, rows_per_iteration, num_warps=_WARPS
    )


add_grouped.register_fake(lambda *_: None)


class _MoveRows(torch.autograd.Function):
    """Copy of tokens to the rows of their experts, or the sum of the rows of each token.

    `apply(x, to_rows, token_of_row, rows_of_token)`: if `to_rows`, x is [T, h], and row r of the
    result [R, h] is the token `token_of_row[r]` of x. Otherwise x is [R, h], and token t of the result
    [T, h] is the sum of the k rows `rows_of_token[t]` of x. Each direction is the gradient of the
    other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to_rows: bool, token_of_row: Tensor, rows_of_token: Tensor
    ) -> Tensor:
        ctx.to_rows = to_rows
        ctx.save_for_backward(token_of_row, rows_of_token)
        if to_rows:
            return x.index_select(0, token_of_row)
        return F.embedding_bag(rows_of_token, x, mode="sum")  # sums in float32, in one launch

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None, None]:
        grad_x = _MoveRows.apply(grad_out.contiguous(), not ctx.to_rows, *ctx.saved_tensors)
        return grad_x, None, None, None


class SortedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher with at most one synchronisation with the host.

    On one rank there is none.
    """

    def __init__(self, layer: MoELayer) -> None:
        """Make a dispatcher for a layer, in place of the one that the layer has made itself."""
        super().__init__(
            layer.num_local_experts,
            layer.local_expert_indices,
            config=layer.config,
            pg_collection=get_default_pg_collection(),
        )
        if self.tp_size * self.ep_size == 1:
            # All rows belong to this rank and are sorted already, so Megatron need not sort them
            # again.
            self.num_local_experts = 1

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sort the tokens by expert.

        Args:
            hidden_states: [..., h], T tokens in all.
            routing_map: [T, E] bool, the experts of each token.
            probs: [T, E], their weights.

        Returns:
            Rows [T k, h] and their weights [T k], sorted by expert; a token has k experts.
        """
        # `self.probs` is detached: the layer would otherwise hold the graph, which leads back to
        # the model, and neither would ever be freed.
        if not use_triton(hidden_states.device):
            sorted_rows: tuple[Tensor, Tensor] = super().dispatch_preprocess(
                hidden_states, routing_map, probs
            )
            self.probs = probs.detach()
            return sorted_rows

        self.hidden_shape = hidden_states.shape
        self.probs = probs.detach()
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)

        # The expert and the token of each row, sorted by expert. The number of rows is known without
        # the host, because no token is dropped.
        row_count = len(probs) * self.config.moe_router_topk
        routes = torch.nonzero_static(routing_map.t(), size=row_count)
        expert_of_row, token_of_row = routes.unbind(1)
        # [T, k]
        rows_of_token = token_of_row.argsort(stable=True).view(len(probs), -1)
        self._order = token_of_row, rows_of_token
        weights = probs.flatten().gather(0, token_of_row * probs.shape[1] + expert_of_row)
        rows = _MoveRows.apply(hidden_states.flatten(0, -2), True, token_of_row, rows_of_token)
        return rows, weights

    def combine_postprocess(self, rows: Tensor) -> Any:
        """Return tokens [..., h] for rows [T k, h]; each token is the sum of its k rows."""
        if not use_triton(rows.device):
            return super().combine_postprocess(rows)
        return _MoveRows.apply(rows.contiguous(), False, *self._order).view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Copy to the host how many rows the ranks send each other.

        Megatron starts the copy at one `point` of the dispatch, and waits for it at the same or a later
        one. A single rank copies nothing. `tokens_per_expert` stays on the device and is returned as
        it is.
        """
        if self.tp_size * self.ep_size > 1:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class GroupedExperts(torch.nn.Module):
    """This rank's experts of a layer, with SwiGLU and no biases; see Megatron's SequentialMLP."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        ffn = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self._is_aligned = ffn % _ROW_MULTIPLE == 0 and hidden % _ROW_MULTIPLE == 0
        self.linear_fc1 = GroupedLinear(config, num_local_experts, 2 * ffn, hidden, partition_dim=0)
        self.linear_fc2 = GroupedLinear(config, num_local_experts, hidden, ffn, partition_dim=1)

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Apply each expert to its rows.

        Args:
            rows: [R, h], sorted by expert.
            counts: [E] number of rows of each expert.
            weights: [R] factor of each row's output.

        Returns:
            Outputs [R, h], and None for the bias.
        """
        groups: Groups
        if use_triton(rows.device) and self._is_aligned and len(rows) > 0:
            groups = counts.cumsum(0, dtype=torch.int32)
        else:
            groups = counts.tolist()
        gate_and_up, _ = self.linear_fc1(rows, groups)
        result: tuple[Tensor, None] = gated_projection(
            self.config,
            gate_and_up,
            row_scale=weights,
            projection=lambda product: self.linear_fc2(product, groups),
        )
        return result


class GroupedLinear(torch.nn.Module):
    """Linear layer of several experts, whose weights [outputs, inputs] are stacked in one parameter.

    The parameter's name has the numbers of the first and the last expert.
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: int,
        outputs: int,
        inputs: int,
        *,
        partition_dim: int,
    ) -> None:
        """Allocate the parameter.

        Args:
            experts: number of experts on this rank.
            outputs, inputs: sizes of an expert's weight on this rank.
            partition_dim: dimension of the weight that tensor parallelism splits.
        """
        super().__init__()
        weight: Any = torch.nn.Parameter(
            torch.empty(experts * outputs, inputs, dtype=config.params_dtype, device=rank_device())
        )
        set_tensor_model_parallel_attributes(weight, True, partition_dim, 1)
        # False tells Megatron that only the ranks with the same experts sum this weight's gradient.
        weight.allreduce = config.expert_model_parallel_size == 1
        self._name = f"weight0-{experts - 1}"
        self._exact = config.deterministic_mode
        self.register_parameter(self._name, weight)

    def forward(self, x: Tensor, groups: Groups) -> tuple[Tensor, None]:
        """Return products [R, outputs] for x [R, inputs] sorted by expert, and None for the bias."""
        return _GroupedProduct.apply(x, self.get_parameter(self._name), groups, self._exact), None


class _GroupedProduct(torch.autograd.Function):
    """`apply(x, weight, groups, exact)`: each row times the weight of its expert.

    `x` is [R, inputs], sorted by expert, the weight is [E · outputs, inputs], and the result is
    [R, outputs]. With `exact`, the bits of a row do not depend on the other rows (see
    `_multiply_groups`). Those of gradients may, because only results are compared with the engine's.
    The gradient of the weight is added to Megatron's float32 buffer, if there is one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, exact: bool) -> Tensor:
        # A frozen weight needs no inputs in the backward pass.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.groups = groups
        ctx.main_grad = getattr(weight, "main_grad", None)
        return _multiply_groups(x, weight.unflatten(0, (len(groups), -1)), groups, exact)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        groups = ctx.groups
        grad_out = grad_out.contiguous()
        transposed = weight.unflatten(0, (len(groups), -1)).transpose(1, 2)
        grad_x = _multiply_groups(grad_out, transposed, groups, exact=False)
        if x is None:
            return grad_x, None, None, None

        grad_weight = ctx.main_grad
        if grad_weight is None:
            grad_weight = torch.zeros(weight.shape, device=weight.device)
        grad_stack = grad_weight.unflatten(0, (len(groups), -1))
        if isinstance(groups, Tensor):
            add_grouped(grad_stack, grad_out, x, groups)
        else:
            expert_rows = zip(grad_stack, grad_out.split(groups), x.split(groups), strict=True)
            for expert_grad_weight, expert_grad_out, expert_x in expert_rows:
                add_product(expert_grad_weight, expert_grad_out.t(), expert_x)

        if ctx.main_grad is None:
            return grad_x, grad_weight.to(weight.dtype), None, None
        return grad_x, mark_grad_as_added(weight), None, None


def _multiply_groups(x: Tensor, stack: Tensor, groups: Groups, exact: bool) -> Tensor:
    """Multiply each row with the weight of its expert: x weightᵀ.

    Args:
        x: [R, inputs], sorted by expert.
        stack: [E, outputs, inputs] weights.
        groups: rows of each expert, see `Groups`.
        exact: on a CPU, a row of the result has the same bits whatever the other rows are.

    Returns:
        [R, outputs]
    """
    if isinstance(groups, Tensor):
        return F.grouped_mm(x, stack.transpose(1, 2), offs=groups)
    multiply = row_product if exact else linear_product
    expert_rows = zip(x.split(groups), stack, strict=True)
    return torch.cat([multiply(expert_x, weight) for expert_x, weight in expert_rows])
