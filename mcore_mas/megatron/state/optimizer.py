"""The optimizer: its state by parameter in every Megatron layout, and its memory offloaded for colocation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from mcore_mas.megatron.host_memory import BlockMemory, flat_storages, pinned_buffers
from mcore_mas.megatron.spec import TrainerSpec

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
_HOST = torch.device("cpu")


def make_optimizer(stages: Sequence[torch.nn.Module], spec: TrainerSpec) -> Any:
    """Megatron's Adam for this rank's `stages`, as wrapped for training."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
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
        ),
        list(stages),
    )
    for group in optimizer.param_groups:
        if (
            "fused" in group
        ):  # torch's Adam, in one loop or launch; Transformer Engine's and Apex' are that anyway
            group["fused"] = True
    if spec.host_moments:
        for own in optimizer.chained_optimizers:
            if (adam := own.optimizer) is not None:
                adam.kept = _host_moments(adam)
                adam.step = partial(_step_by_weight, adam, adam.step)
    return optimizer


def _host_moments(adam: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Where in the host's memory each moment of a weight on a GPU is kept; float32."""
    weights = [w for group in adam.param_groups for w in group["params"] if w.device != _HOST]
    places = iter(pinned_buffers(4 * w.numel() for w in weights for _ in MOMENTS))
    return {
        w: {moment: next(places).view(torch.float32).view(w.shape) for moment in MOMENTS}
        for w in sorted(weights, key=Tensor.numel, reverse=True)
    }


def _step_by_weight(adam: Any, step: Callable[[], object]) -> None:
    """Step one weight after the other, each with the moments that are kept in host memory on its device meanwhile.

    Adam steps every weight by itself, so the result is that of one call to the bit; settings and counts that a group
    holds are those after its last weight.
    """
    groups = adam.param_groups
    try:
        for group in groups:
            one = dict(group)
            for weight in group["params"]:
                one = {**group, "params": [weight]}
                adam.param_groups = [one]
                places, state = adam.kept.get(weight, {}), adam.state.get(weight, {})
                state |= {
                    m: state[m].to(weight.device, non_blocking=True) for m in places if m in state
                }
                step()
                state = adam.state.get(weight, {})
                state |= {
                    m: place.copy_(state[m], non_blocking=True)
                    for m, place in places.items()
                    if m in state
                }
            group.update({key: value for key, value in one.items() if key != "params"})
    finally:
        adam.param_groups = groups
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies are whole


def gathers_late(spec: TrainerSpec) -> bool:
    """Whether the weights that other ranks have stepped are fetched in the next forward pass, layer by layer.

    Those of adapters are few, and held by modules that Megatron does not see called: they are fetched at once.
    """
    return spec.overlap and spec.distributed_optimizer and spec.lora is None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShard:
    """What this rank steps of a shard: elements [first, last) of the flat shard."""

    first: int
    last: int
    tensors: dict[
        str, Tensor
    ]  # flat, by kind: the master weight in float32 and, after a step, Adam's moments


class OptimizerState:
    """Float32 master weights and Adam's moments of this rank's shards."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        """`optimizer` as `make_optimizer` gives it, for `parameters` by Megatron name."""
        # experts that ranks share out have an optimizer of their own, because they are summed over fewer ranks; one
        # without a parameter on this rank has nothing inside
        self._chained = [own for own in optimizer.chained_optimizers if own.optimizer is not None]
        self._distributed = any(
            hasattr(own, "model_param_group_index_map") for own in self._chained
        )
        self._adam = {
            id(stepped): own.optimizer
            for own in self._chained
            for group in own.optimizer.param_groups
            for stepped in group["params"]
        }
        self._parameters = parameters

    def parts(self) -> dict[str, OptimizerShard]:
        """What this rank steps of its parameters, by Megatron name."""
        found = {}
        for name, parameter in self._parameters.items():
            if here := self._stepped(parameter):
                stepped, first, last = here
                held = self._adam[id(stepped)].state
                moments = {moment: held[stepped][moment] for moment in MOMENTS if stepped in held}
                tensors = {WEIGHT: stepped, **moments}
                flat = {kind: tensor.detach().reshape(-1) for kind, tensor in tensors.items()}
                found[name] = OptimizerShard(first=first, last=last, tensors=flat)
        return found

    def tensors(self) -> list[Tensor]:
        """All that the inner optimizers hold: what they step, which may be the weights themselves, and moments."""
        inner = [own.optimizer for own in self._chained]
        stepped = [
            tensor for adam in inner for group in adam.param_groups for tensor in group["params"]
        ]
        held = [
            value for adam in inner for state in adam.state.values() for value in state.values()
        ]
        return stepped + [value for value in held if isinstance(value, Tensor)]

    def gradients(self) -> list[Tensor]:
        """The parts of the gradient buffers that this rank steps by, once `prepare_grads` has found them; float32."""
        groups = [group for own in self._chained for group in own.optimizer.param_groups]
        return [
            stepped.grad
            for group in groups
            for stepped in group["params"]
            if stepped.grad is not None
        ]

    def load(self, read: Callable[[str, str, int, int], Tensor], steps: int) -> None:
        """Continue after `steps` steps from what `parts` gave on all ranks; after none, without moments.

        `read` gives elements [first, last) of a parameter's flat shard of a kind; one is held at a time.
        """
        for own in self._chained:
            own.optimizer.state.clear()
            for group in own.optimizer.param_groups:
                group["step"] = steps  # Transformer Engine's Adam counts here, torch's by tensor
        for name, parameter in self._parameters.items():
            here = self._stepped(parameter)
            weight = read(name, WEIGHT, 0, parameter.numel())
            with torch.no_grad():
                parameter.copy_(weight.view(parameter.shape))
                if here is None:
                    continue
                stepped, first, last = here
                stepped.copy_(weight[first:last].view(stepped.shape))
            if steps:
                adam = self._adam[id(stepped)]
                held = getattr(adam, "kept", {}).get(stepped) or {
                    m: torch.empty_like(stepped) for m in MOMENTS
                }
                for moment, place in held.items():
                    place.copy_(read(name, moment, first, last).view(stepped.shape))
                # one step tensor for each: Adam counts up in place
                adam.state[stepped] = {
                    "step": torch.tensor(float(steps), device=stepped.device),
                    **held,
                }

    def _stepped(self, parameter: Tensor) -> tuple[Tensor, int, int] | None:
        """The tensor that an inner optimizer steps for elements [first, last) of a parameter's flat shard, and these.

        None where another rank does.
        """
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), 0, parameter.numel()
        for own in self._chained:
            if parameter in own.model_param_group_index_map:
                group, order = own.model_param_group_index_map[parameter]
                span = own._get_model_param_range_map(parameter)["param"]
                return own.optimizer.param_groups[group]["params"][order], span.start, span.end
        return None


class Offload:
    """Frees gradient buffers, and moves what must be kept to host memory and back.

    The storages of tensors are emptied in place, so that every view of them (a parameter in its buffer, a gradient, an
    optimizer's part) is what it was once they are filled again.
    """

    def __init__(
        self, gradients: Iterable[Tensor], kept: Callable[[], Iterable[Tensor]], host: BlockMemory
    ) -> None:
        """`gradients` come back as zeros; `kept` says anew at each sleep which tensors come back as they were."""
        self._gradients = flat_storages(gradients)
        self._kept = kept
        self._host = host
        self._emptied: list[Tensor] = []  # of them those that were kept

    def sleep(self) -> int:
        """Give the memory away; returns how many bytes."""
        self._emptied = flat_storages(self._kept())
        for part, place in self._host.slots(self._emptied):
            place.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are whole
        for held in (given := [*self._gradients, *self._emptied]):
            held.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(map(len, given))

    def wake(self) -> None:
        """Take the memory back, with the same bits in all that was kept."""
        for held in (*self._gradients, *self._emptied):
            held.untyped_storage().resize_(len(held))
        for gradient in self._gradients:
            gradient.zero_()
        for part, place in self._host.slots(self._emptied):
            part.copy_(place, non_blocking=True)
        self._emptied = []
