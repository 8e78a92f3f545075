"""Full gradients of a trainer's last update, which training itself never gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.state.weight_export import export_weights, plan_export
from mcore_mas.megatron.step.trainer import MegatronTrainer
from rollout.models.tensors import whole


def gradients_of(trainer: MegatronTrainer) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face or PEFT name, full clipped gradient) of the last update.

    Every rank must iterate to the end.
    """
    model = trainer._model
    local = {
        name: _whole_shard(trainer, parameter)
        for name, parameter in model.trained_parameters.items()
    }
    plan = plan_export(local, model.architecture)
    return (
        (name, whole(blocks))
        for name, blocks in export_weights(local.__getitem__, model.architecture, plan)
    )


def _whole_shard(trainer: MegatronTrainer, parameter: Any) -> Tensor:
    """Sum a shard's gradient over the data- and context-parallel ranks."""
    mine: Tensor = parameter.main_grad.detach()
    if not trainer._state.is_distributed:
        return mine
    found = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    part = trainer._state.stepped_part(parameter)
    if part is not None:
        own = slice(part.first, part.last)
        found.view(-1)[own] = mine.reshape(-1)[own]
    # Every element is set by one rank and is zero on the others, so that the sum is exact.
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:  # an expert's
        group = parallel_state.get_expert_data_parallel_group()
    dist.all_reduce(found, group=group)
    return found
