"""Model weights: safetensors files, full tensors in blocks of rows, and checksums of them (XXH3, and SGLang's own)."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.architecture import open_tensors, tensor_files

RowBlocks = Tensor | Sequence[Tensor]  # a full tensor, or blocks of its rows in their order
WeightStream = Iterable[tuple[str, RowBlocks]]  # Hugging Face name and tensor, one at a time
_Key = TypeVar("_Key")


def blocks_of(rows: RowBlocks) -> Sequence[Tensor]:
    """The blocks; a full tensor is one."""
    return [rows] if isinstance(rows, Tensor) else rows


def whole(rows: RowBlocks) -> Tensor:
    """The full tensor; blocks are copied, unless there is just one."""
    blocks = blocks_of(rows)
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def shape_of(rows: RowBlocks) -> torch.Size:
    """Shape of the full tensor."""
    if isinstance(rows, Tensor):
        return rows.shape
    return torch.Size((sum(len(block) for block in rows), *rows[0].shape[1:]))


def cut(target: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """The part of `target` for each block, cut in its first dimension, which may stand for several rows."""
    if len(blocks) == 1:
        return [target]
    rows = sum(len(block) for block in blocks)
    parts: Sequence[Tensor] = target.split([len(block) * len(target) // rows for block in blocks])
    return parts


def buckets(
    tensors: Iterable[tuple[_Key, Tensor]],
    limit: int,
    kind: Callable[[_Key], object] = lambda _: None,
) -> Iterator[list[tuple[_Key, Tensor]]]:
    """Split a stream into lists of one `kind`, each of at most `limit` bytes, or of one larger tensor."""
    held: dict[object, list[tuple[_Key, Tensor]]] = {}
    for key, tensor in tensors:
        alike = held.setdefault(kind(key), [])
        if alike and sum(one.nbytes for _, one in alike) + tensor.nbytes > limit:
            yield held.pop(kind(key))
            alike = held.setdefault(kind(key), [])
        alike.append((key, tensor))
    yield from held.values()


class TensorFiles:
    """The tensors in safetensors files, by Hugging Face name; what is read of them is what is sliced."""

    def __init__(self, folder: Path | str, *files: Path) -> None:
        """Map `files` of a folder, or what its index names, else all; ModelError if none is there to be read."""
        self.where = folder
        self.opened = {file: open_tensors(file, "pt") for file in files or tensor_files(folder)}
        self._files = {name: opened for opened in self.opened.values() for name in opened.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def sliced(self, name: str) -> Any:
        """The tensor as safetensors cuts it: `get_shape()`, and `[slices]` for a part."""
        return self._files[name].get_slice(name)


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of all in a folder, one at a time."""
    files = TensorFiles(folder)
    return ((name, files.read(name)) for name in files)


def tensor_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor of a folder, from the files' headers alone."""
    files = TensorFiles(folder)
    return {name: tuple(files.sliced(name).get_shape()) for name in files}


def complete(
    weights: WeightStream,
    manifest: Mapping[str, Sequence[int]],
    shares: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[tuple[str, RowBlocks]]:
    """Pass on tensors as long as `manifest` has their names and shapes; a tied head's second name is left out.

    A tensor of `shares` may have the shape there.

    Raises:
        EngineError: names the tensor that is missing, unknown, repeated or of another shape.
    """
    left = dict(manifest)
    for name, rows in weights:
        if name not in left:
            if name == "lm_head.weight" and name not in manifest:
                continue
            raise EngineError(
                f"tensor '{name}' {'comes twice' if name in manifest else 'is unknown to this model'}"
            )
        shape, share = left.pop(name), (shares or {}).get(name, ())
        if list(shape_of(rows)) not in (list(shape), list(share)):
            raise EngineError(
                f"tensor '{name}' has shape {list(shape_of(rows))}; expected {list(shape)}"
            )
        yield name, rows
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise EngineError(f"tensor '{next(iter(left))}'{more} is missing from the update")


def compare(engine: Mapping[str, str], trainer: Mapping[str, str], version: int) -> None:
    """Hold an engine's checksums against the trainer's; tensors that only one side names are not compared.

    Raises:
        EngineError: names the first tensor that differs.
    """
    differ = [name for name, value in trainer.items() if name in engine and engine[name] != value]
    if differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise EngineError(
            f"tensor '{differ[0]}'{more}: the engine's bytes differ from the trainer's at version {version}; "
            "the hand-over is broken"
        )


_PART = 1 << 19  # bytes: what is summed is still in the processor's cache after it was copied


def begun_checksum(shape: Sequence[int]) -> xxhash.xxh3_128:
    """Of a tensor's shape; it is to take the tensor's bytes in the order of its indices, as they come."""
    return xxhash.xxh3_128(str(list(shape)).encode())


def checksum(tensor: Tensor) -> str:
    """The checksum of a tensor that is all there: 32 hexadecimal digits."""
    digest = begun_checksum(tensor.shape)
    digest.update(flat_bytes(tensor.detach().cpu().contiguous()).data)
    return digest.hexdigest()


def copy(rows: RowBlocks, target: Tensor, digest: xxhash.xxh3_128) -> Iterator[int]:
    """Copy into the float32 `target`, part by part, what the digest takes too; yields how many bytes lie there by then.

    Args:
        rows: of the same elements in the same order.
    """
    blocks, written = blocks_of(rows), 0
    for block, place in zip(blocks, cut(target, blocks), strict=True):
        data = block.detach().to("cpu", torch.float32).contiguous()
        source = flat_bytes(data)
        if place.is_contiguous():
            goal = flat_bytes(place)
            for first in range(0, len(source), _PART):
                part = source[first : first + _PART]
                goal[first : first + _PART] = part
                digest.update(part.data)
                yield written + first + len(part)
        else:
            place.copy_(data.view(place.shape))
            digest.update(source.data)
        written += len(source)
        yield written


def flat_bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU that lies in one piece."""
    flat: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return flat


_TILE = 8192  # words whose sum is mixed once more
_TILES = 512  # at once: bounds the memory
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACES = (
    (0x27D4EB2D, 15),
    (0x165667B1, 13),
)  # what a word's place is multiplied with, and rotated by
_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1


def gpu_hash(tensor: Tensor) -> int:
    """What `gpu_tensor_hash` of SGLang 0.5.23 (kernels/ops/memory/gpu_tensor_hash.py) gives: 64 bits of the memory.

    The bytes, filled up with zeros, are words of 32 bits. A word is xored with its place and mixed as in MurmurHash3
    (Appleby), in two ways; the sums of every 8192 are mixed with the size, and added up as numbers of 64 bits.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    if not len(data):
        return 0
    if data.is_cuda and importlib.util.find_spec("triton"):
        from rollout.models.hash_kernel import sum_of_tiles  # Triton comes with torch for CUDA only

        return _finish(sum_of_tiles(data, _SEEDS) & _LONG)
    return _finish(_sum_of_tiles(data) & _LONG)


def _sum_of_tiles(data: Tensor) -> int:
    """As the kernel of that name, in numpy, of words that are int32 for torch."""
    words, total = data.cpu().numpy().view(np.uint32), 0
    for first in range(0, len(words), _TILE * _TILES):
        part = words[first : first + _TILE * _TILES]
        at = np.arange(first, first + len(part)).astype(np.uint32)
        for half, seed, (factor, by) in zip((32, 0), _SEEDS, _PLACES, strict=True):
            mixed = _mix(part ^ (at * factor + seed) ^ ((at << by) | (at >> (32 - by))))
            sums = (
                np.pad(mixed, (0, -len(mixed) % _TILE)).reshape(-1, _TILE).sum(1, dtype=np.uint32)
            )
            total += int(_mix(sums ^ (4 * len(words) & _WORD)).sum(dtype=np.uint64)) << half
    return total


def _mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's fmix32 of uint32, whose products wrap."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    mixed: np.ndarray = x ^ (x >> 16)
    return mixed


def _finish(x: int) -> int:
    """The end of SplitMix64 (Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)
