"""Adam's moments in host memory: each weight's moments visit the GPU while it is stepped."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mcore_mas.megatron.host_memory import pinned_buffers

# Names of Adam's moments in its state.
MOMENTS = ("exp_avg", "exp_avg_sq")

# Host tensors of each stepped weight, by moment, of the weight's shape in float32.
HostMoments: TypeAlias = Mapping[Tensor, Mapping[str, Tensor]]


def keep_moments_on_host(optimizer: Any) -> HostMoments:
    """Make a Megatron optimizer keep the moments of weights on a GPU in host memory.

    Args:
        optimizer: result of `make_optimizer`; the `step` of its Adams is replaced.

    Returns:
        The host memory, for `OptimizerState`.
    """
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for chained in optimizer.chained_optimizers:
        adam = chained.optimizer
        if adam is None:
            continue
        adam_moments = _allocate_moments(adam)
        adam.step = partial(_step_by_weight, adam, adam.step, adam_moments)
        moments |= adam_moments
    return moments


def _allocate_moments(adam: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Allocate page-locked memory for the moments of all weights that are on a GPU."""
    weights: list[Tensor] = []
    for group in adam.param_groups:
        weights += [weight for weight in group["params"] if weight.device.type != "cpu"]
    buffers = iter(pinned_buffers(4 * weight.numel() for weight in weights for _ in MOMENTS))
    moments: dict[Tensor, dict[str, Tensor]] = {}
    # The buffers come in descending order of size.
    for weight in sorted(weights, key=Tensor.numel, reverse=True):
        moments[weight] = {
            moment: next(buffers).view(torch.float32).view(weight.shape) for moment in MOMENTS
        }
    return moments


def _step_by_weight(adam: Any, step: Callable[[], object], host_moments: HostMoments) -> None:
    """Step one weight after the other, with its moments on its device meanwhile.

    Adam steps every weight independently, so the result has the bits of a single call. An Adam
    that counts its steps in a group, as Transformer Engine's does, counts one step for all weights.

    Args:
        adam: optimizer that steps the weights in its `param_groups`.
        step: the original `adam.step`.
        host_moments: moments that are on the host, by weight; those of other weights stay in `adam.state`.
    """
    groups = adam.param_groups
    try:
        for group in groups:
            single_group = dict(group)
            for weight in group["params"]:
                single_group = {**group, "params": [weight]}
                adam.param_groups = [single_group]
                host_tensors = host_moments.get(weight, {})

                state = adam.state.get(weight, {})
                for moment in host_tensors:
                    if moment in state:  # there is none before the first step
                        state[moment] = state[moment].to(weight.device, non_blocking=True)
                step()
                state = adam.state.get(weight, {})
                for moment, host_tensor in host_tensors.items():
                    if moment in state:
                        state[moment] = host_tensor.copy_(state[moment], non_blocking=True)
            # Keep what the last of these steps has changed in the group, such as a step count.
            single_group.pop("params")
            group.update(single_group)
    finally:
        adam.param_groups = groups
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # wait until the copies are complete
