"""A layer's experts as one product each way, and tokens sorted by expert without the host, with torch and Triton alone.

Megatron without Transformer Engine computes one expert after the other, as soon as the host knows how many tokens each
has. Here a layer's experts are two stacks of weights: torch multiplies every expert's tokens by its weight in one
launch, and a kernel adds the gradients of a stack to Megatron's float32 buffer in another.

Router replay (R3, arXiv 2510.11370): a trainer sends each token to the experts that the engine sampled it with.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.main_grad import add_product, placeholder_grad
from mcore_mas.megatron.model.linear import linear_product
from mcore_mas.megatron.model.mlp import gated_projection
from rollout.models.architecture import Experts
from rollout.models.exact import row_product

# Groups of rows that are sorted by expert: on a GPU the end index of each group, [E] int32; on a CPU their sizes.
Groups = Tensor | list[int]
_ALIGNED = 8  # torch's grouped product needs rows that are a multiple of this number of elements
# Tile of the gradient kernel: rows and columns of a gradient, tokens per iteration, and warps.
_BLOCK, _TERMS, _WARPS = 128, 64, 8


@torch.library.custom_op("mcore_mas::add_grouped", mutates_args={"total"})
def add_grouped(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """total [E, rows, columns] float32 += leftᵀ right of each expert, of left [R, rows] and right [R, columns]."""
    from mcore_mas.megatron.model.layer_kernels import add_grouped_kernel

    experts, rows, columns = total.shape
    tiles = -(-columns // _BLOCK), -(-rows // _BLOCK), experts
    terms = 2 * _TERMS // left.element_size()  # as much shared memory for float32
    add_grouped_kernel[tiles](
        total, left, right, ends, (rows, columns), _BLOCK, terms, num_warps=_WARPS
    )


add_grouped.register_fake(lambda *_: None)


class _Moved(torch.autograd.Function):
    """If `spread`, rows `tokens` [R] of x [T, h]; else of R rows the sum of each token's, at `places` [T, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: bool, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.spread = spread
        ctx.save_for_backward(tokens, places)
        return (
            x.index_select(0, tokens) if spread else F.embedding_bag(places, x, mode="sum")
        )  # float32, by one launch

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            _Moved.apply(of_out.contiguous(), not ctx.spread, *ctx.saved_tensors),
            None,
            None,
            None,
        )


class SortedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher without host syncs on one rank, and with one host sync on several."""

    def __init__(self, layer: MoELayer) -> None:
        """Make a dispatcher for a layer, in place of the one that the layer has made itself."""
        super().__init__(
            layer.num_local_experts,
            layer.local_expert_indices,
            config=layer.config,
            pg_collection=get_default_pg_collection(),
        )
        if self.tp_size * self.ep_size == 1:
            # All rows belong to this rank and are sorted already, so Megatron need not sort them again.
            self.num_local_experts = 1

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows [T k, h] and their weights [T k] sorted by expert, of tokens [..., h] with maps and weights [T, E]."""
        if not use_triton(hidden_states.device):
            sorted_rows: tuple[Tensor, Tensor] = super().dispatch_preprocess(
                hidden_states, routing_map, probs
            )
            self.probs = (
                probs.detach()
            )  # else the graph behind it, which leads to the model, would keep both for good
            return sorted_rows
        self.hidden_shape, self.probs = hidden_states.shape, probs.detach()
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        size = len(probs) * self.config.moe_router_topk  # none is dropped
        experts, tokens = torch.nonzero_static(routing_map.t(), size=size).unbind(1)
        self._order = tokens, tokens.argsort(stable=True).view(len(probs), -1)
        weights = probs.flatten().gather(0, tokens * probs.shape[1] + experts)
        return _Moved.apply(hidden_states.flatten(0, -2), True, *self._order), weights

    def combine_postprocess(self, rows: Tensor) -> Any:
        """Tokens [..., h], each the sum of its rows."""
        if not use_triton(rows.device):
            return super().combine_postprocess(rows)
        return _Moved.apply(rows.contiguous(), False, *self._order).view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Tell the host how many rows go from rank to rank; how many an expert has stays on the device."""
        if self.tp_size * self.ep_size > 1:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class GroupedExperts(torch.nn.Module):
    """A layer's experts on this rank, as Megatron's SequentialMLP: of each two halves of a gate, SwiGLU, a way back."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        ffn, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self._aligned = ffn % _ALIGNED == hidden % _ALIGNED == 0
        self.linear_fc1 = GroupedLinear(config, num_local_experts, 2 * ffn, hidden, cut=0)
        self.linear_fc2 = GroupedLinear(config, num_local_experts, hidden, ffn, cut=1)

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """(Each row's output times its weight [R, h], None) of rows [R, h] sorted by expert.

        Args:
            counts: [E] of them, by expert.
            weights: [R].
        """
        one_launch = use_triton(rows.device) and self._aligned and len(rows) > 0
        groups: Groups = counts.cumsum(0, dtype=torch.int32) if one_launch else counts.tolist()
        wide, _ = self.linear_fc1(rows, groups)
        out: tuple[Tensor, None] = gated_projection(
            self.config, wide, row_scale=weights, projection=lambda x: self.linear_fc2(x, groups)
        )
        return out


class GroupedLinear(torch.nn.Module):
    """The weights [rows, inputs] of a layer's experts, one below the other in a parameter that says which they are."""

    def __init__(
        self, config: TransformerConfig, experts: int, rows: int, inputs: int, *, cut: int
    ) -> None:
        """`rows` and `inputs` are of this rank; tensor parallelism cuts dimension `cut`."""
        super().__init__()
        weight: Any = torch.empty(
            experts * rows, inputs, dtype=config.params_dtype, device=rank_device()
        )
        weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(weight, True, cut, 1)
        weight.allreduce = (
            config.expert_model_parallel_size == 1
        )  # else it is summed over fewer ranks
        self._name, self._exact = f"weight0-{experts - 1}", config.deterministic_mode
        self.register_parameter(self._name, weight)

    def forward(self, x: Tensor, groups: Groups) -> tuple[Tensor, None]:
        """(Products [R, rows], None) of x [R, inputs], as Megatron's linear layers; the bias is nothing."""
        return _GroupedProduct.apply(x, self.get_parameter(self._name), groups, self._exact), None


class _GroupedProduct(torch.autograd.Function):
    """`apply(x, weight, groups, exact)`: [R, rows] of sorted x [R, inputs] and a weight [E · rows, inputs]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, exact: bool) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.groups, ctx.total = groups, getattr(weight, "main_grad", None)
        return _products(x, weight.unflatten(0, (len(groups), -1)), groups, exact)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_out, groups = of_out.contiguous(), ctx.groups
        of_x = _products(
            of_out, weight.unflatten(0, (len(groups), -1)).transpose(1, 2), groups, exact=False
        )
        if x is None:
            return of_x, None, None, None
        total = torch.zeros(weight.shape, device=weight.device) if ctx.total is None else ctx.total
        stack = total.unflatten(0, (len(groups), -1))
        if isinstance(groups, Tensor):
            add_grouped(stack, of_out, x, groups)
        else:
            for part, rows, inputs in zip(
                stack, of_out.split(groups), x.split(groups), strict=True
            ):
                add_product(part, rows.t(), inputs)
        return (
            of_x,
            total.to(weight.dtype) if ctx.total is None else placeholder_grad(weight),
            None,
            None,
        )


def _products(x: Tensor, stack: Tensor, groups: Groups, exact: bool) -> Tensor:
    """Each expert's rows of x [R, inputs] times its weight of stack [E, rows, inputs], transposed."""
    if isinstance(groups, Tensor):
        return F.grouped_mm(x, stack.transpose(1, 2), offs=groups)
    multiply = row_product if exact else linear_product
    return torch.cat(
        [multiply(part, weight) for part, weight in zip(x.split(groups), stack, strict=True)]
    )


class RoutingReplay(RouterReplay):
    """What Megatron's router asks for its top-k experts: those on record, weighed by the trainer's own logits.

    Where nothing is on record, as of padding, they are the trainer's own. Megatron's class takes turns between forward
    passes and recomputed ones, with all micro-batches in a queue; here a layer's input says which experts it goes with,
    so that pipelines and recomputation need no turns.
    """

    def __init__(self) -> None:
        """Nothing is on record. Megatron's list of all replays is left alone: it would outlive the model."""
        self.recorded: Tensor | None = None  # [T, k] of the tokens that the router sees next

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [T, k] of the experts that each token goes to, of `scores` [T, E]."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.recorded is None:
            return values, own
        there = self.recorded.to(own.dtype)
        chosen = torch.where((there >= 0) & (there < scores.shape[1]), there, own)
        return scores.gather(1, chosen), chosen


def replay_routing(layers: Iterable[Any], experts: Experts) -> None:
    """Have the sparse ones of a stage's layers take their experts from the layout of what they are given.

    They read it when they are called, so a layer that is computed again in the backward pass reads the same.
    """
    for layer in layers:
        number = int(layer.layer_number) - 1  # of the whole model
        if experts.sparse[number]:
            replay = layer.mlp.router.router_replay = RoutingReplay()
            hook = partial(_read, replay, sum(experts.sparse[:number]))
            layer.register_forward_pre_hook(hook, with_kwargs=True)


def _read(
    replay: RoutingReplay, place: int, _layer: torch.nn.Module, _: Any, given: dict[str, Any]
) -> None:
    """Take the layer's part, its `place` among the sparse ones, of what is on record."""
    routing = given["packed_seq_params"].routing
    replay.recorded = None if routing is None else routing[:, place]
