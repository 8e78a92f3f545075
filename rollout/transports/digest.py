"""Checksums of a stream of weights, under the names and in the form in which its engine holds them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.transports.checksum import checksum
from rollout.transports.handover import Route


class Digest(Protocol):
    """Collects what an engine will say of the same weights."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor of the stream."""

    def finish(self) -> dict[str, str]:
        """Checksums by the engine's names."""


class Plain:
    """Of every tensor as it is."""

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._sums[name] = checksum(tensor)

    def finish(self) -> dict[str, str]:
        return self._sums


class Nothing:
    """Of nothing."""

    def add(self, name: str, tensor: Tensor) -> None:
        pass

    def finish(self) -> dict[str, str]:
        return {}


_FUSED = {  # SGLang's tensor -> the tensors that it stacks, in the order of the stream
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERT_PADDING = 32  # of an expert's inner width; DEFAULT_MOE_PADDING_SIZE in configs/update_config.py
_VOCAB = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING = 64  # rows; DEFAULT_VOCAB_PADDING_SIZE in layers/vocab_parallel_embedding.py


class SGLang:
    """Of a decoder as one SGLang rank without a GPU holds it: stacked projections and experts, padding, sha256.

    What `/weights_checker` answers with `action: checksum` in SGLang 0.5.23 (utils/weight_checker.py, `tensor_hash` in
    managers/mm_utils.py). A stack of which not every part came is not compared.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._experts: dict[str, dict[tuple[int, str], Tensor]] = {}  # by their stack: by number and part
        self._sums: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        stem, leaf, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
        tensor = tensor.to(self._dtype)
        expert = _EXPERT.fullmatch(name)
        if expert:
            self._experts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
        elif leaf in _PART:
            fused, order = _PART[leaf]
            whole = f"{stem}.{fused}.{kind}"
            parts = self._parts.setdefault(whole, {})
            parts[leaf] = tensor
            if len(parts) == len(order):
                self._sums[whole] = _sha(torch.cat([parts[part] for part in order]))
                del self._parts[whole]
        elif name in _VOCAB:
            padding = -len(tensor) % _VOCAB_PADDING
            self._sums[name] = _sha(pad(tensor, (0, 0, 0, padding)))
        else:
            self._sums[name] = _sha(tensor)

    def finish(self) -> dict[str, str]:
        for stack, parts in self._experts.items():
            self._sums |= {f"{stack}.{name}": _sha(tensor) for name, tensor in _stacked(parts).items()}
        self._experts.clear()
        return self._sums


def _stacked(parts: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    """The matrices of a layer's experts, gate above up, with the inner width padded by zeros."""
    first, second = [], []
    for number in range(len(parts) // 3):
        gate, up, down = (parts[number, part] for part in ("gate", "up", "down"))
        padding = -len(gate) % _EXPERT_PADDING
        first.append(torch.cat([pad(gate, (0, 0, 0, padding)), pad(up, (0, 0, 0, padding))]))
        second.append(pad(down, (0, padding)))
    return {"w13_weight": torch.stack(first), "w2_weight": torch.stack(second)}


def digest_of(route: Route) -> Digest:
    """The digest that the engine at the end of `route` is compared by."""
    wanted = route.options.get("digest", "plain")
    if wanted == "sglang":
        return SGLang(getattr(torch, route.options["dtype"]))
    return Plain() if wanted == "plain" else Nothing()


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).digest()[:8].hex()
