"""Checksums of a stream of weights, under the names and in the layout of the engine that holds them."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rollout.models.tensors import WeightStream, checksum, complete, gpu_hash, whole
from rollout.sync import SyncRoute
from rollout.sync.sglang_layout import SGLangLayout, of_rank


class WeightDigest:
    """Collects what an engine will say of the same weights: nothing, or `plain`, as the embedded one holds them."""

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self._sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor of the stream."""
        if self._plain:
            self._sums[name] = checksum(tensor.float())

    def finish(self) -> dict[str, str]:
        """Checksums by the engine's names."""
        return self._sums


class SGLangDigest(WeightDigest):
    """Of a decoder as SGLang's ranks hold it.

    What `/weights_checker` answers with `action: checksum` in SGLang 0.5.23 (utils/weight_checker.py, `tensor_hash` in
    managers/mm_utils.py): sha256 without a GPU, a hash of its own with one. A stack of which not every part came is not
    compared.
    """

    def __init__(self, *, share: tuple[int, int] = (0, 1), **held: Any) -> None:
        """`held` is what `SGLangLayout` is told; of `share[1]` trainer ranks each takes a tensor's sums in turn."""
        super().__init__()
        self._turns = cycle(rank == share[0] for rank in range(share[1]))
        self._layout, self._tp, self._gpu = SGLangLayout(**held), int(held["tp"]), bool(held["gpu"])

    def add(self, name: str, tensor: Tensor) -> None:
        self._take(self._layout.add(name, tensor))

    def finish(self) -> dict[str, str]:
        self._take(self._layout.finish())
        return self._sums

    def _take(self, done: Iterable[tuple[str, Iterable[Tensor]]]) -> None:
        for name, shards in done:
            before, said = None, ""
            for rank, shard in enumerate(shards if next(self._turns) else ()):
                said = said if shard is before else sum_of(shard, gpu=self._gpu)
                self._sums[of_rank(name, rank, self._tp)], before = said, shard


def sum_of(tensor: Tensor, *, gpu: bool) -> str:
    """The checksum that a server of SGLang's with or without a GPU says of one of its tensors."""
    if gpu:
        return f"{gpu_hash(tensor):016x}"
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def digest_of(route: SyncRoute, share: tuple[int, int] = (0, 1)) -> WeightDigest:
    """The digest that the engine at the end of `route` is compared by, or one rank's `share` of it."""
    held = route.options.get("held")  # as `SGLangLayout` is told; {}: nothing is compared
    return SGLangDigest(**held, share=share) if held else WeightDigest(plain=held is None)


def digested(
    weights: WeightStream, manifest: Mapping[str, Sequence[int]], digest: WeightDigest
) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a stream that is `complete`, of which `digest` takes note where they are."""
    for name, rows in complete(weights, manifest):
        tensor = whole(rows).detach()
        digest.add(name, tensor)
        yield name, tensor
