"""Router replay (R3, arXiv 2510.11370): the trainer uses the experts that the engine used."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from rollout.models.architecture import Experts


class EngineRoutingReplay(RouterReplay):
    """Top-k choice of Megatron's router: the recorded experts, with the trainer's scores for them.

    Tokens without a record, such as padding, go to the experts that the trainer's scores choose.
    Megatron's class keeps a queue of micro-batches, and has to be told which pass is a recomputation.
    Here the recorded experts come with a layer's input, so pipelines and recomputation need no such
    state.
    """

    def __init__(self) -> None:
        """Start without a record.

        Megatron's constructor is not called: it would add this object to a global list, where it
        would outlive the model.
        """
        self.recorded: Tensor | None = None  # [T, k] of the tokens that the router gets next

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [T, k] and the indices [T, k] of each token's experts, for `scores` [T, E]."""
        assert default_compute_topk is not None
        values, router_choice = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.recorded is None:
            return values, router_choice
        recorded = self.recorded.to(router_choice.dtype)
        # `UNKNOWN_EXPERT` is read as 255 if an index has one byte, and as -1 if it has two.
        is_known = (recorded >= 0) & (recorded < scores.shape[1])
        experts = torch.where(is_known, recorded, router_choice)
        return scores.gather(1, experts), experts


def replay_routing(layers: Iterable[Any], experts: Experts) -> None:
    """Make the MoE layers of a pipeline stage use the recorded experts, `PackedTrees.routing`.

    `PackedTrees` is an argument of each call of a layer, so a recomputed layer uses the same experts.

    Args:
        layers: layers of the stage.
        experts: experts of the whole model.
    """
    for layer in layers:
        number = int(layer.layer_number) - 1  # in the whole model
        if experts.sparse[number]:
            replay = EngineRoutingReplay()
            layer.mlp.router.router_replay = replay
            sparse_number = sum(experts.sparse[:number])
            hook = partial(_take_recorded_experts, replay, sparse_number)
            layer.register_forward_pre_hook(hook, with_kwargs=True)


def _take_recorded_experts(
    replay: EngineRoutingReplay,
    sparse_number: int,
    _layer: torch.nn.Module,
    _args: Any,
    kwargs: dict[str, Any],
) -> None:
    """Give the router of an MoE layer the experts that the engine chose in this layer.

    This is a forward pre-hook of the layer.

    Args:
        replay: replay of the layer's router.
        sparse_number: number of the layer, counting MoE layers only.
    """
    routing = kwargs["packed_seq_params"].routing
    replay.recorded = None if routing is None else routing[:, sparse_number]
