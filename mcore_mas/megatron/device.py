"""A rank's device and its watchdog.

Micro-batches to the device, the host's memory beside it, values between ranks, and what megatron-core leaves to Apex on
a GPU. The watchdog: each rank says in a file what it is at, and where it stands when that takes too long.
"""

# mypy: disable-error-code="attr-defined"

import asyncio
import faulthandler
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.base.processes import ProcessLost

_T = TypeVar("_T")
_BLOCK = 64 << 20  # bytes of host memory that are had at once, and copied at once
_ALIGNED = 256  # bytes, as the allocator's own: a kernel may read 16 at once


def kernels_run(device: torch.device) -> bool:
    """Whether Triton's kernels compute on a device."""
    return device.type != "cpu" and importlib.util.find_spec("triton") is not None


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
        # Apex' module of that name
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda inputs, of_out, total: add_product(
                total, of_out.t(), inputs
            )
        )


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


def of_weight(weight: Tensor, total: Tensor | None, ctx: Any) -> Tensor | None:
    """The gradient as autograd is to see it: of a buffer it is told nothing new, where another use passes one on."""
    if total is None or ctx.total is None:
        return None if total is None else total.to(weight.dtype)
    return None if ctx.embeds else added(weight)


def _norm(
    _chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], *_: Any
) -> tuple[Tensor, None]:
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
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of `group` (None: all) gave, in rank order, on every rank; numbers, strings, lists and dicts."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [value]
    written = torch.tensor(
        list(json.dumps(value).encode()), dtype=torch.uint8, device=rank_device()
    )
    sizes = [torch.empty(1, dtype=torch.int64, device=rank_device()) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(written)], device=rank_device()), group=group)
    longest = int(max(sizes))
    texts = [torch.empty(longest, dtype=torch.uint8, device=rank_device()) for _ in range(ranks)]
    dist.all_gather(
        texts, torch.nn.functional.pad(written, (0, longest - len(written))), group=group
    )
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(texts, sizes, strict=True)
    ]


def upload(value: _T, device: torch.device, stream: torch.cuda.Stream | None = None) -> _T:
    """The same with all its tensors on `device`: those of a tensor, a tuple or a dataclass, and of what is in them.

    They travel together from page-locked memory, on `stream` (None: the one that computes, which need not wait for
    them then). On the CPU nothing is copied.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}  # a tensor that is in several places travels once
    _replaced(value, lambda tensor: found.setdefault(id(tensor), tensor))
    sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNED for tensor in found.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(packed.split(sizes), found.values(), strict=True):
        place[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    computes = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        there = packed.to(device, non_blocking=True)
    there.record_stream(computes)  # its memory is the other's, which is not to use it again before
    places = dict(zip(found, there.split(sizes), strict=True))

    def moved(tensor: Tensor) -> Tensor:
        own: Tensor = places[id(tensor)][: tensor.nbytes]
        return own.view(tensor.dtype).view(tensor.shape)

    return _replaced(value, moved)  # type: ignore[no-any-return]


def uploads(
    values: Iterable[_T], device: torch.device, stream: torch.cuda.Stream | None
) -> Iterator[_T]:
    """Each value on `device`, once the one after it is on its way on `stream`, beside what the device computes."""
    sent = (
        (upload(value, device, stream), stream.record_event() if stream else None)
        for value in values
    )
    for (value, arrived), _ in pairwise(chain(sent, [None])):  # type: ignore[misc]
        if arrived:
            torch.cuda.current_stream(device).wait_event(arrived)
        yield value


class BlockMemory:
    """Memory of the host, where there is a GPU page-locked, or of a device, that grows as it is needed.

    The host's takes long to be had, and torch rounds a block up to a power of two, so all blocks are of one such size.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Hold nothing yet; `device` None is the host."""
        self._blocks: list[Tensor] = []
        self._how: dict[str, Any] = (
            {"device": device} if device else {"pin_memory": torch.cuda.is_available()}
        )

    def beside(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of contiguous tensors and for each its place here, both flat and as bytes.

        Asked of the same tensors again, the places are the same and hold what was put there.
        """
        at = 0
        for tensor in tensors:
            left = tensor.detach().view(-1).view(torch.uint8)
            while len(left):
                if at == len(self._blocks) * _BLOCK:
                    self._blocks.append(torch.empty(_BLOCK, dtype=torch.uint8, **self._how))
                place = self._blocks[at // _BLOCK][at % _BLOCK :][: len(left)]
                yield left[: len(place)], place
                left, at = left[len(place) :], at + len(place)

    def exchange(self, tensors: Iterable[Tensor]) -> None:
        """What is beside the tensors and what they hold change places; the device does so in its turn."""
        for part, place in self.beside(tensors):
            before = part.clone()
            part.copy_(place, non_blocking=True)
            place.copy_(before, non_blocking=True)


def host_places(sizes: Iterable[int]) -> list[Tensor]:
    """Page-locked places of so many bytes each, the largest first; as blocks of powers of two, of which 1 % is left."""
    ordered = sorted(sizes, reverse=True)
    left, block, places = sum(ordered), torch.empty(0), []
    for size in ordered:
        if size > len(block):
            rounded = 1 << max(left.bit_length() - 1, (size - 1).bit_length())
            block = torch.empty(rounded, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        places.append(block[:size])
        block, left = block[size:], left - size
    return places


def stored(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What the storages of tensors hold, each storage once, flat and as bytes."""
    found = {
        storage._cdata: storage
        for tensor in tensors
        if (storage := tensor.untyped_storage()).nbytes()
    }
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in found.values()
    ]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float32 tensors [n] on the CPU, by one copy, for which the host waits once."""
    if not tensors:
        return []
    together = torch.cat(list(tensors)).cpu()
    return list(together.split([len(tensor) for tensor in tensors]))


def _replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_replaced(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _replaced(getattr(value, name), change) for name in names})
    return value


_LOOKS = 8  # in the time after which a rank hangs
_FRAMES = 4  # of a rank's stack that are told, the innermost last
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_CALLS = "trainer_group.py"  # what is in the stack of the thread that a rank's calls run in
_LATE = "Timeout ("  # what faulthandler writes first


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFiles:
    """Where the ranks of a policy say what they are at, in a folder that all nodes see."""

    folder: Path
    policy: str
    hang_s: float  # without a sign of life of any rank, after which they hang

    def of(self, rank: int) -> Path:
        """A rank's file: its phase, and if that takes too long the stacks of its threads."""
        return self.folder / f"{self.policy}-{rank}.txt"

    async def stalled(self, answers: Sequence[asyncio.Future[Any]]) -> NoReturn:
        """Watch the ranks that owe these answers, one each, until this is cancelled.

        Raises:
            ProcessLost: none has shown a sign of life for `hang_s`; which does not answer, and where others stand.
        """
        seen, since = None, time.monotonic()
        while time.monotonic() - since < self.hang_s * (
            1 + 2 / _LOOKS
        ):  # their own watchdogs come first
            await asyncio.sleep(self.hang_s / _LOOKS)
            if (now := [self._beat(rank) for rank in range(len(answers))]) != seen:
                seen, since = now, time.monotonic()
        told = "; ".join(
            f"{'rank' if len(own) == 1 else 'ranks'} {', '.join(map(str, own))} {what}"
            for what, own in self._standing(
                [n for n, answer in enumerate(answers) if not answer.done()]
            ).items()
        )
        raise ProcessLost(
            f"policy {self.policy}: nothing for {time.monotonic() - since:.0f} s; {told}"
        )

    def _beat(self, rank: int) -> int:
        """The time of a rank's last sign of life, of which a dump of its stacks is none."""
        with suppress(OSError):
            if _LATE not in (path := self.of(rank)).read_text():
                return path.stat().st_mtime_ns
        return 0

    def _standing(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """What these ranks are at, those that do not answer first; with the ranks that are at it."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            text = self.of(rank).read_text() if self.of(rank).is_file() else ""
            phase, _, dump = text.partition("\n")
            what = f"does not answer in {phase}" if phase else "has not begun"
            what = (
                f"stands in {phase} at {_place(dump)}"
                if _LATE in dump
                else f"{what} (is it stopped?)"
            )
            found.setdefault(what, []).append(rank)
        return dict(sorted(found.items()))


def _place(dump: str) -> str:
    """The innermost frames of the thread that a rank's calls run in."""
    threads = [_FRAME.findall(thread) for thread in dump.split("\nThread ")]
    own = next(
        (frames for frames in threads if any(_CALLS in file for file, _, _ in frames)), threads[0]
    )
    return " > ".join(
        f"{Path(file).name}:{line} {name}" for file, line, name in reversed(own[:_FRAMES])
    )


class RankWatch:
    """A rank's own watchdog; the thread that writes stacks is faulthandler's, which no lock of Python's holds up."""

    def __init__(self, path: Path, hang_s: float) -> None:
        """Write into `path` from now on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._hang_s, self._phase = path.open("wb", buffering=0), hang_s, b""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the block, which is called `name`."""
        global _running
        self._phase, _running = name.encode() + b"\n", self
        try:
            self.beat()
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._phase, _running = b"", None
            self._write()

    def beat(self) -> None:
        """This rank goes on."""
        self._write()
        faulthandler.dump_traceback_later(self._hang_s, file=self._file)

    def _write(self) -> None:
        file = self._file.fileno()
        with suppress(OSError):  # of a disk that is full
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, self._phase)
            os.utime(file)


_running: RankWatch | None = None  # of this process, in a phase


def beat() -> None:
    """The rank of this process, if it is one and is watched, goes on."""
    if _running is not None:
        _running.beat()
