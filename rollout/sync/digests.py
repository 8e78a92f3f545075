"""Checksums of a stream of weights, under the names and in the layout of the engine that holds them."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_mas.rollout.models.tensors import WeightStream, checksum, complete, gpu_hash, whole
from mcore_mas.rollout.sync import SyncRoute


class WeightDigest:
    """Collects what an engine will say of the same weights: nothing."""

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor of the stream."""

    def finish(self) -> dict[str, str]:
        """Checksums by the engine's names."""
        return self._sums


class PlainDigest(WeightDigest):
    """Of every tensor in float32, as the embedded engine holds it."""

    def add(self, name: str, tensor: Tensor) -> None:
        self._sums[name] = checksum(tensor.float())


_FUSED = {  # SGLang's tensor -> the tensors that it stacks, in the order of the stream
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_COLUMNS = ("o_proj", "down_proj")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERT_PADDING = 32  # of an expert's inner width without a GPU; DEFAULT_MOE_PADDING_SIZE in configs/update_config.py
_VOCAB = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING = 64  # rows; DEFAULT_VOCAB_PADDING_SIZE in layers/vocab_parallel_embedding.py
_LAYER = re.compile(r"\.\d+\.")


class SGLangDigest(WeightDigest):
    """Of a decoder as SGLang's ranks hold it: cut for each, projections and experts stacked, vocabulary padded.

    What `/weights_checker` answers with `action: checksum` in SGLang 0.5.23 (utils/weight_checker.py, `tensor_hash` in
    managers/mm_utils.py): sha256 without a GPU, a hash of its own with one. A stack of which not every part came is not
    compared.
    """

    def __init__(self, *, dtype: str, tp: int, kv_heads: int, gpu: bool, share: tuple[int, int] = (0, 1)) -> None:
        """`tp` ranks share out `kv_heads` heads of keys and values; where there are fewer, several hold the same.

        `share` is a trainer's rank and how many take the sums, a tensor each in turn.
        """
        super().__init__()
        self._turns = cycle(rank == share[0] for rank in range(share[1]))
        self._dtype, self._tp = getattr(torch, dtype), tp
        self._kv_parts = min(tp, kv_heads)
        self._hash = gpu_hash if gpu else _sha
        self._padding = 1 if gpu else _EXPERT_PADDING
        self._parts: dict[str, dict[str, list[Tensor]]] = {}
        self._layer = ""  # whose experts are coming
        self._experts: dict[tuple[int, str], Tensor] = {}  # by number and part

    def add(self, name: str, tensor: Tensor) -> None:
        stem, leaf, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
        tensor = tensor.to(self._dtype)
        expert = _EXPERT.fullmatch(name)
        if expert:
            if expert[1] != self._layer:
                self._stack()
                self._layer = expert[1]
            self._experts[int(expert[2]), expert[3]] = tensor
        elif leaf in _PART:
            fused, order = _PART[leaf]
            parts = self._parts.setdefault(f"{stem}.{fused}.{kind}", {})
            parts[leaf] = self._rows(tensor, self._kv_parts if leaf in ("k_proj", "v_proj") else self._tp)
            if len(parts) == len(order):
                shards = zip(*(parts[part] for part in order), strict=True)
                self._take(f"{stem}.{fused}.{kind}", map(torch.cat, shards))
                del self._parts[f"{stem}.{fused}.{kind}"]
        elif name in _VOCAB:
            padding = -len(tensor) % _VOCAB_PADDING
            if (len(tensor) + padding) % self._tp:
                padding = -len(tensor) % (_VOCAB_PADDING * self._tp)
            self._take(name, self._rows(pad(tensor, (0, 0, 0, padding)), self._tp))
        elif leaf in _COLUMNS and kind == "weight":
            self._take(name, tensor.chunk(self._tp, dim=1))
        else:
            self._take(name, [tensor] * self._tp)

    def finish(self) -> dict[str, str]:
        self._stack()
        return self._sums

    def _rows(self, tensor: Tensor, parts: int) -> list[Tensor]:
        """Each rank's rows, the same for neighbours where there are fewer parts than ranks."""
        return [part for part in tensor.chunk(parts) for _ in range(self._tp // parts)]

    def _take(self, name: str, shards: Iterable[Tensor]) -> None:
        before, said = None, ""
        for rank, shard in enumerate(shards if next(self._turns) else ()):
            said = said if shard is before else f"{self._hash(shard):016x}"
            self._sums[of_rank(name, rank, self._tp)], before = said, shard

    def _stack(self) -> None:
        """The matrices of a layer's experts, gate above up, with the inner width padded by zeros."""
        ranks: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(self._tp)]
        for number in range(len(self._experts) // 3):
            gate, up, down = (self._experts[number, part] for part in ("gate", "up", "down"))
            padding = -len(gate) % self._padding
            cut = (*(pad(x, (0, 0, 0, padding)).chunk(self._tp) for x in (gate, up)),)
            for (first, second), *shards in zip(ranks, *cut, pad(down, (0, padding)).chunk(self._tp, 1), strict=True):
                first.append(torch.cat(shards[:2]))
                second.append(shards[2])
        if self._experts:
            self._take(f"{self._layer}.w13_weight", (torch.stack(first) for first, _ in ranks))
            self._take(f"{self._layer}.w2_weight", (torch.stack(second) for _, second in ranks))
        self._experts = {}


def of_rank(name: str, rank: int, ranks: int) -> str:
    """What the tensor of one rank is called here."""
    return f"{name} of rank {rank}" if ranks > 1 else name


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is part of."""
    found = _LAYER.search(name)
    return int(found[0][1:-1]) if found else None


def kind_of(name: str) -> str:
    """A tensor's name without its layer: tensors of a kind lie in an engine's memory in the same form."""
    return _LAYER.sub(".*.", name, count=1)


def digest_of(route: SyncRoute, share: tuple[int, int] = (0, 1)) -> WeightDigest:
    """The digest that the engine at the end of `route` is compared by, or one rank's `share` of it."""
    wanted = route.options.get("digest", "plain")
    if wanted == "sglang":
        return SGLangDigest(**route.options["held"], share=share)
    return PlainDigest() if wanted == "plain" else WeightDigest()


def digested(
    weights: WeightStream, manifest: Mapping[str, Sequence[int]], digest: WeightDigest
) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a stream that is `complete`, of which `digest` takes note where they are."""
    for name, rows in complete(weights, manifest):
        tensor = whole(rows).detach()
        digest.add(name, tensor)
        yield name, tensor


def _sha(tensor: Tensor) -> int:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data.data).digest()[:8], "big")
