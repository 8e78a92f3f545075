"""Megatron's Adam, and access to its state by parameter in every parallel layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.host_moments import MOMENTS, HostMoments

# Key of the master weight in `OptimizerShard.tensors`, besides those of the moments.
_WEIGHT = "weight"


def make_optimizer(stages: Sequence[torch.nn.Module], spec: TrainerSpec) -> Any:
    """Return torch's AdamW in Megatron's optimizer, for this rank's pipeline stages.

    Megatron would take the Adam of Transformer Engine or Apex if one of them is installed, which
    rounds differently.

    Args:
        stages: pipeline stages, each in Megatron's `DistributedDataParallel`.
        spec: specification of the trainer.
    """
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        weight_decay=spec.weight_decay,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=gathers_late(spec),
        bf16=spec.bf16,
        params_dtype=torch.bfloat16 if spec.bf16 else torch.float32,
    )
    optimizer = get_megatron_optimizer(config, list(stages))
    for group in optimizer.param_groups:
        group["fused"] = True  # one loop or launch for all parameters
    return optimizer


def step_optimizer(optimizer: Any, norm: float) -> None:
    """Clip the gradients, and step.

    Megatron's own `step` computes the norm of the gradients again, for which the host waits.

    Args:
        optimizer: result of `make_optimizer`, after `prepare_grads`.
        norm: norm of the gradients, as `get_grad_norm` returns it.
    """
    with torch.no_grad():
        for chained in optimizer.chained_optimizers:
            parameters = chained.get_parameters()
            max_norm = chained.config.clip_grad
            if parameters and max_norm > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=norm)
    optimizer.step_with_ready_grads()


def gathers_late(spec: TrainerSpec) -> bool:
    """Return True if a rank gathers the weights that others have stepped in its next forward pass.

    It does so layer by layer, during the computation. Adapters are gathered at once: they are
    small, and Megatron does not see the modules that hold them being called.
    """
    return spec.overlap and spec.distributed_optimizer and spec.lora is None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShard:
    """Elements [first, end) of a parameter's flat shard, which this rank steps.

    Attributes:
        tensors: float32 [end - first], by kind: "weight", the master weight, and after a step
            Adam's moments.
    """

    first: int
    end: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedPart:
    """Tensor that an inner Adam steps for elements [first, end) of a flat shard."""

    tensor: Tensor
    first: int
    end: int


class OptimizerState:
    """Float32 master weights and Adam's moments of this rank's shards."""

    def __init__(
        self,
        optimizer: Any,
        parameters: Mapping[str, Tensor],
        host_moments: HostMoments | None = None,
    ) -> None:
        """Find the inner Adam of every parameter.

        Args:
            optimizer: result of `make_optimizer`.
            parameters: this rank's shards by Megatron name.
            host_moments: result of `keep_moments_on_host`; None: moments are on the device.
        """
        # Experts have an optimizer of their own if they are split over ranks, because their
        # gradients are summed over fewer ranks. An optimizer that has no parameter on this rank has
        # no inner Adam.
        self._chained = [
            chained for chained in optimizer.chained_optimizers if chained.optimizer is not None
        ]
        self.is_distributed = any(
            hasattr(chained, "model_param_group_index_map") for chained in self._chained
        )
        self._adam_by_tensor: dict[int, Any] = {}
        for chained in self._chained:
            for group in chained.optimizer.param_groups:
                self._adam_by_tensor |= {
                    id(tensor): chained.optimizer for tensor in group["params"]
                }
        self._parameters = parameters
        self._host_moments = host_moments or {}

    def parts(self) -> dict[str, OptimizerShard]:
        """Return the parts of this rank's parameters that it steps, by Megatron name."""
        shards = {}
        for name, parameter in self._parameters.items():
            part = self.stepped_part(parameter)
            if part is None:
                continue
            tensors = {_WEIGHT: part.tensor}
            adam_state = self._adam_by_tensor[id(part.tensor)].state
            if part.tensor in adam_state:
                tensors |= {moment: adam_state[part.tensor][moment] for moment in MOMENTS}
            shards[name] = OptimizerShard(
                first=part.first,
                end=part.end,
                tensors={kind: tensor.detach().reshape(-1) for kind, tensor in tensors.items()},
            )
        return shards

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the inner Adams: those that they step, then their state.

        A stepped tensor may be the parameter itself.
        """
        tensors = list(self._stepped_tensors())
        for chained in self._chained:
            for state in chained.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return tensors

    def gradients(self) -> list[Tensor]:
        """Return the float32 gradients that this rank steps by; call `prepare_grads` before."""
        return [tensor.grad for tensor in self._stepped_tensors() if tensor.grad is not None]

    def _stepped_tensors(self) -> Iterator[Tensor]:
        for chained in self._chained:
            for group in chained.optimizer.param_groups:
                yield from group["params"]

    def load(self, read: Callable[[str, str, int, int], Tensor], steps: int) -> None:
        """Set weights and optimizer state to those that `parts` returned on all ranks.

        Args:
            read: `read(name, kind, first, end)` returns elements [first, end) of a parameter's flat
                shard. The kind is a key of `OptimizerShard.tensors`: the weight or a moment. One
                result is held at a time.
            steps: optimizer steps taken before; if 0, there are no moments.
        """
        for chained in self._chained:
            chained.optimizer.state.clear()
        for name, parameter in self._parameters.items():
            weight = read(name, _WEIGHT, 0, parameter.numel())
            part = self.stepped_part(parameter)
            with torch.no_grad():
                parameter.copy_(weight.view(parameter.shape))
                if part is None:
                    continue
                part.tensor.copy_(weight[part.first : part.end].view(part.tensor.shape))
            if steps:
                self._load_moments(name, part, read, steps)

    def _load_moments(
        self, name: str, part: SteppedPart, read: Callable[[str, str, int, int], Tensor], steps: int
    ) -> None:
        stepped = part.tensor
        moments = self._host_moments.get(stepped)
        if moments is None:
            moments = {moment: torch.empty_like(stepped) for moment in MOMENTS}
        for moment, tensor in moments.items():
            tensor.copy_(read(name, moment, part.first, part.end).view(stepped.shape))
        # Every parameter needs a step tensor of its own, because Adam increments it in place.
        step = torch.tensor(float(steps), device=stepped.device)
        self._adam_by_tensor[id(stepped)].state[stepped] = {"step": step, **moments}

    def stepped_part(self, parameter: Tensor) -> SteppedPart | None:
        """Return the part of a parameter that this rank steps; None if only other ranks step it."""
        if not self.is_distributed:
            tensor = getattr(parameter, "main_param", parameter)
            return SteppedPart(tensor=tensor, first=0, end=parameter.numel())
        for chained in self._chained:
            if parameter in chained.model_param_group_index_map:
                group, index = chained.model_param_group_index_map[parameter]
                span = chained._get_model_param_range_map(parameter)["param"]
                tensor = chained.optimizer.param_groups[group]["params"][index]
                return SteppedPart(tensor=tensor, first=span.start, end=span.end)
        return None
