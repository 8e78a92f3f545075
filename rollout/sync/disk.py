"""Weight sync through a shared folder: all tensors, the changed ones, or the changed elements (delta)."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.base.files import atomic_folder
from rollout.models.architecture import read_architecture
from rollout.models.fused_weights import NOWHERE, AdapterShape, AdapterWeights, write_peft
from rollout.models.tensors import TensorFiles, WeightStream, complete, tensor_shapes, whole
from rollout.sync import Stored, WeightSender
from rollout.sync.digests import WeightDigest, digest_of, digested

_FILE_BYTES = 1 << 30  # of one file: what a rank holds of the model besides its shard
_INDEX, _VALUE = (
    "#index",
    "#value",
)  # after a tensor's name: flat positions int32 or int64, and what stands there now
_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes of an element


class FolderSender(WeightSender):
    """Rank 0 writes every version into a folder of its own below the route's place; the one before it goes.

    `disk` writes all tensors, `changed` those that differ from the last version sent, and `delta` positions and values
    of what differs in these: nothing is rounded. A tensor of which so much changed that positions cost more than they
    save is written whole, and so are all when the engine holds another version than the last one sent.
    """

    def _open(self) -> None:
        self._transport = self._route.transport
        self._manifest = tensor_shapes(self._route.model)
        self._version: int | None = None  # that was sent last, whole
        self._last: dict[str, Tensor] = {}  # what is compared with

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """Write `v<version>/`."""
        base = (
            self._version
            if self._version is not None and state.get("base") == self._version
            else None
        )
        self._version = None  # until all of the new version is written
        digest = digest_of(self._route) if self._leads else WeightDigest()
        final, written = Path(self._route.place) / f"v{version:06d}", 0
        stream = digested(weights, self._manifest, digest)
        if not self._leads:
            deque(stream, maxlen=0)
        else:
            with atomic_folder(final) as partial:
                held: dict[str, Tensor] = {}
                for name, full in stream:
                    now = full.cpu().contiguous()
                    part = self._part(name, self._last.get(name) if base is not None else None, now)
                    if part and self._transport != "disk":
                        self._last[name] = now.clone()
                    written += sum(tensor.nbytes for tensor in part.values())
                    held |= part
                    if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
                        _save(partial, held, base)
                        held = {}
                _save(partial, held, base)
            for old in final.parent.glob("v[0-9]*"):
                if old.name != final.name:
                    rmtree(old, ignore_errors=True)
        self._version = version
        return str(final), digest.finish(), written

    def _part(self, name: str, before: Tensor | None, now: Tensor) -> dict[str, Tensor]:
        """What to write of a tensor that was `before` in the version that the engine holds; None: not known."""
        if self._transport == "delta":
            return changes(name, before, now)
        return {} if before is not None and torch.equal(_bits(before), _bits(now)) else {name: now}


class AdapterSender(WeightSender):
    """Rank 0 writes every version of an adapter into a folder of its own in PEFT's format; the last two stay."""

    def _open(self) -> None:
        self._shape: AdapterShape = self._route.options["adapter"]
        places = AdapterWeights(read_architecture(self._route.model), self._shape, NOWHERE).places
        self._manifest = {name: tuple(size) for name, (size, _) in places.items()}

    def _write(self, weights: WeightStream, version: int, state: Mapping[str, Any]) -> Stored:
        """Write `v<version>/`.

        Raises:
            EngineError: a number is not finite; it would reach the log-probabilities of every reply.
        """
        final, shape = Path(self._route.place) / f"v{version:06d}", self._shape
        stream = complete(weights, self._manifest)
        full = {name: whole(rows).detach().cpu().contiguous() for name, rows in stream}
        if not self._leads:
            return str(final), {}, 0
        if bad := next(
            (name for name, tensor in full.items() if not tensor.isfinite().all()), None
        ):
            raise EngineError(
                f"{bad} of version {version} has a number that is not finite; it is not handed over"
            )
        write_peft(
            final,
            self._route.model,
            full,
            rank=shape.rank,
            alpha=shape.scale * shape.rank,
            targets=shape.targets,
        )
        # a server that starts again reads the version before, until all have the new one
        old = sorted(
            (f for f in final.parent.glob("v[0-9]*") if f != final), key=lambda f: f.stat().st_mtime
        )
        for folder in old[:-1]:
            rmtree(folder, ignore_errors=True)
        return str(final), {}, sum(tensor.nbytes for tensor in full.values())


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, flat: -0.0 is not 0.0, and NaN is itself."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _save(folder: Path, tensors: dict[str, Tensor], base: int | None) -> None:
    if tensors or not any(folder.iterdir()):  # the first file says what the version starts from
        metadata = {"format": "pt", "base": json.dumps(base)}
        save_file(
            tensors,
            str(folder / f"model-{len(list(folder.iterdir())):05d}.safetensors"),
            metadata=metadata,
        )


def changes(name: str, before: Tensor | None, now: Tensor) -> dict[str, Tensor]:
    """What to write so that `now` can be made from `before`: nothing, positions and values, or all of it."""
    if before is None:
        return {name: now}
    index = (_bits(before) != _bits(now)).nonzero()[:, 0]
    if not len(index):
        return {}
    index = index.to(torch.int32 if now.numel() < 2**31 else torch.int64)
    if len(index) * (index.element_size() + now.element_size()) >= now.nbytes:
        return {name: now}
    return {name + _INDEX: index, name + _VALUE: now.view(-1)[index.long()]}


def patched(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, held: int
) -> Iterator[tuple[str, Tensor]]:
    """A stream of the weights as `folder` makes them out of `tensors`, the full tensors of version `held`.

    Raises:
        EngineError: the folder does not start from that version.
    """
    files = TensorFiles(folder)
    for path, opened in files.opened.items():
        base = json.loads(opened.metadata()["base"])
        if base is not None and base != held:
            raise EngineError(
                f"{path}: changes since version {base}, but the engine holds version {held}"
            )
    for name, tensor in tensors:
        if name in files:
            yield name, files.read(name)
        elif name + _INDEX in files:
            value = files.read(name + _VALUE)
            whole = tensor.to(value.dtype, copy=True).contiguous()
            whole.view(-1)[files.read(name + _INDEX).long()] = value
            yield name, whole
        else:
            yield name, tensor
