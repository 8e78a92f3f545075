"""Parallel layouts: how many ranks a model is cut over, and which layouts cut which model."""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NoReturn

from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, Experts

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
Recompute = Literal[
    "none", "selective", "full"
]  # of activations: norms' outputs and SwiGLU's products, or all


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How many ranks each kind of parallelism takes."""

    tp: int = 1  # ranks of tensor parallelism
    pp: int = 1  # ranks of pipeline parallelism
    vpp: int = 1  # pipeline stages on each of them
    cp: int = 1  # context-parallel ranks
    dp: int = 1  # ranks of data parallelism
    ep: int = 1  # of those, how many share out the experts of a layer
    sp: bool = False  # sequence parallelism: cut what tensor parallelism repeats

    @property
    def ranks(self) -> int:
        """Processes of a trainer."""
        return self.tp * self.pp * self.cp * self.dp


_ATTENTION: tuple[Projection, ...] = ("q", "k", "v", "o")


def check_fit(
    a: Architecture,
    layout: ParallelLayout,
    layers: str = "local",
    targets: Collection[Projection] = (),
) -> None:
    """Refuse to train a model in a parallel layout that cannot cut it, or with what is not there.

    Args:
        layers: whose linear layers.
        targets: projections that get adapters.

    Raises:
        ModelError: says what fits.
    """
    tp, pp, vpp, cp = layout.tp, layout.pp, layout.vpp, layout.cp
    sizes = {"heads": a.heads, "key/value heads": a.kv_heads, "feed-forward width": a.ffn}
    if a.experts:
        sizes["expert width"] = a.experts.ffn
    for what, size in sizes.items():
        if size % tp:
            _refuse(f"tp: {tp} does not divide the model's {size} {what}", tp, *sizes.values())
    heads = a.heads // tp
    if heads % cp:
        _refuse(
            f"cp: {cp} does not divide the {heads} heads that tp: {tp} leaves to each rank",
            cp,
            heads,
        )
    if a.layers % (pp * vpp):
        stages = f"pp: {pp}" if vpp == 1 else f"pp · vpp: {pp} · {vpp}"
        _refuse(f"{stages} does not divide the model's {a.layers} layers", pp * vpp, a.layers)
    if vpp > 1 and pp == 1:
        raise ModelError(
            f"vpp: {vpp} stages on each pipeline rank need pp of 2 or more; use vpp: 1, or pp: 2"
        )
    if layout.sp and tp == 1:
        raise ModelError("sp: cutting by sequence needs tp of 2 or more; use sp: false, or tp: 2")
    if a.experts is None and layout.ep > 1:
        raise ModelError(
            f"ep: {layout.ep} on a model without experts; valid here: [1], nearest: 1 (dp is what repeats it)"
        )
    if layers == "te" and targets:
        raise ModelError(
            "lora with layers: te would adapt what Transformer Engine's linear layers are given, before the norm that "
            "they contain; use layers: local"
        )
    if layers == "te" and importlib.util.find_spec("transformer_engine") is None:
        raise ModelError(
            "layers: te needs Transformer Engine, which is not installed here; use layers: local, or install "
            "transformer-engine[pytorch]"
        )
    if a.experts:
        _check_experts(a.experts, layout, targets)


def _check_experts(
    experts: Experts, layout: ParallelLayout, targets: Collection[Projection]
) -> None:
    if experts.per_token == 1 and experts.normalised:
        raise ModelError(
            "norm_topk_prob with num_experts_per_tok: 1 gives every expert weight 1, so its router cannot learn"
        )
    ranks = layout.dp * layout.cp  # that hold whole layers, each with tokens of its own
    if experts.count % layout.ep or ranks % layout.ep:
        must = f"must divide the model's {experts.count} experts, and dp · cp: {ranks}, whose ranks share them"
        _refuse(f"ep: {layout.ep} {must}", layout.ep, experts.count, ranks)
    if layout.tp > 1 and not layout.sp:
        raise ModelError(
            f"tp: {layout.tp} on a mixture of experts cuts by sequence too; use sp: true, or tp: 1"
        )
    if refused := [x for x in targets if x not in _ATTENTION]:
        raise ModelError(
            f"lora.targets: {', '.join(refused)} of a mixture of experts are its experts', which take no adapters; "
            f"use targets: [{', '.join(_ATTENTION)}], or some of them"
        )


def _refuse(why: str, asked: int, *sizes: int) -> NoReturn:
    """Name the numbers that divide all `sizes`."""
    valid = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    nearest = min(valid, key=lambda n: abs(n - asked))
    raise ModelError(f"{why}; valid here: {valid}, nearest: {nearest}")
