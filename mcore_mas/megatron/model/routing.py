"""Router replay (R3, arXiv 2510.11370): a trainer sends each token to the experts that the engine sampled it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from mcore_mas.rollout.models.architecture import Experts


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


def _read(replay: RoutingReplay, place: int, _layer: torch.nn.Module, _: Any, given: dict[str, Any]) -> None:
    """Take the layer's part, its `place` among the sparse ones, of what is on record."""
    routing = given["packed_seq_params"].routing
    replay.recorded = None if routing is None else routing[:, place]
