"""A rank's device: micro-batches to it, values between ranks, and what megatron-core leaves to Apex on a GPU."""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")
_ALIGNED = 256  # bytes, as the allocator's own: a kernel may read 16 at once


def patch_fallbacks() -> None:
    """Replace Megatron's fallbacks for a GPU without Transformer Engine or Apex.

    They read the norm of every gradient by itself, and the host waits for each; they launch kernels by parameter; and
    the gradient of a weight is made in bfloat16 before it is added to its float32 buffer.
    """
    if not torch.cuda.is_available():
        return
    utils = importlib.import_module("megatron.core.utils")
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clip.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip.l2_norm_impl = _norm
        for module in (clip, importlib.import_module("megatron.core.optimizer.optimizer")):
            module.multi_tensor_scale_impl = _scale
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not layers._grad_accum_fusion_available:
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = _WeightGradient


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total += a @ b
    else:  # cuBLAS adds to float32 what it makes of bfloat16 factors
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def added(weight: Tensor) -> Tensor:
    """A gradient that says nothing: Megatron asks for one, but it is in its buffer already."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


class _WeightGradient:
    """Apex' module of that name."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, of_out: Tensor, total: Tensor) -> None:
        add_product(total, of_out.t(), inputs)


def _norm(_chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """The norm [1] of all tensors together."""
    norms = torch._foreach_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale(_chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], scale: float) -> None:
    """Write the first list's tensors, scaled, into the second's."""
    source, target = tensors
    if source is not target:
        torch._foreach_copy_(target, source)
    if scale != 1.0:
        torch._foreach_mul_(target, scale)


def rank_device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of `group` (None: all) gave, in rank order, on every rank; numbers, strings, lists and dicts."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [value]
    written = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=rank_device())
    sizes = [torch.empty(1, dtype=torch.int64, device=rank_device()) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(written)], device=rank_device()), group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8, device=rank_device()) for _ in range(ranks)]
    dist.all_gather(texts, torch.nn.functional.pad(written, (0, longest - len(written))), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def upload(value: _T, device: torch.device) -> _T:
    """The same with all its tensors on `device`: those of a tensor, a tuple or a dataclass, and of what is in them.

    They travel together from page-locked memory, beside what the device computes. On the CPU nothing is copied.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}  # a tensor that is in several places travels once
    _replaced(value, lambda tensor: found.setdefault(id(tensor), tensor))
    sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNED for tensor in found.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(packed.split(sizes), found.values(), strict=True):
        place[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    places = dict(zip(found, packed.to(device, non_blocking=True).split(sizes), strict=True))

    def moved(tensor: Tensor) -> Tensor:
        there: Tensor = places[id(tensor)][: tensor.nbytes]
        return there.view(tensor.dtype).view(tensor.shape)

    result: _T = _replaced(value, moved)
    return result


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float32 tensors [n] on the CPU, by one copy, for which the host waits once."""
    if not tensors:
        return []
    together = torch.cat(list(tensors)).cpu()
    return list(together.split([len(tensor) for tensor in tensors]))


def ahead(values: Iterable[_T]) -> Iterator[_T]:
    """Each value once the one after it has been made as well."""
    waiting: list[_T] = []
    for value in values:
        waiting.append(value)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_replaced(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _replaced(getattr(value, name), change) for name in names})
    return value
