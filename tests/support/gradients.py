"""Full gradients of a trainer's last update.

Training itself never gathers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_mas.megatron.state.weight_export import export_weights, plan_export
from mcore_mas.megatron.step.trainer import MegatronTrainer
from rollout.models.tensors import join_blocks


def full_gradients(trainer: MegatronTrainer) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face or PEFT name, full clipped gradient) of the last update.

    Every rank must iterate to the end.
    """
    model = trainer.model
    local = {
        name: _whole_shard(trainer, parameter)
        for name, parameter in model.trained_parameters.items()
    }
    plan = plan_export(local, model.architecture)
    for name, blocks in export_weights(local.__getitem__, model.architecture, plan):
        yield name, join_blocks(blocks)


def _whole_shard(trainer: MegatronTrainer, parameter: Any) -> Tensor:
    """Return a shard's gradient, gathered over the data- and context-parallel ranks."""
    local: Tensor = parameter.main_grad.detach()
    if not trainer._state.is_distributed:
        return local

    # With the distributed optimizer, a rank has the reduced gradient of its part only. Every
    # element is set by one rank and is zero on the others, so that the sum is exact.
    gradient = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    part = trainer._state.stepped_part(parameter)
    if part is not None:
        elements = slice(part.first, part.end)
        gradient.view(-1)[elements] = local.reshape(-1)[elements]
    is_expert = not getattr(parameter, "allreduce", True)
    if is_expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(gradient, group=group)
    return gradient
