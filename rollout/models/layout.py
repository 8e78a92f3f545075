"""Parallel layout of a trainer, and the check that a model can be divided by it."""

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NoReturn

from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, Experts

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
ATTENTION_PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")

# Activations that are computed again in the backward pass: none, the outputs of norms and of
# SwiGLU, or those of whole layers.
Recompute = Literal["none", "selective", "full"]

# Names that Megatron gives to formats of FP8: e4m3 for all factors, or e5m2 for gradients.
Fp8Format = Literal["hybrid", "e4m3"]
# Names that Megatron gives to ways to scale factors: one scale for a tensor, for 128 numbers or for 32.
Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8"]
# Number of which every dimension of a matrix product in FP8 must be a multiple: widths, and numbers of tokens.
FP8_MULTIPLES: dict[Fp8Recipe, int] = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degree of each kind of parallelism of a trainer."""

    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline parallelism
    vpp: int = 1  # pipeline stages on each pipeline rank (virtual pipeline parallelism)
    cp: int = 1  # context parallelism
    dp: int = 1  # data parallelism
    ep: int = 1  # expert parallelism, over the ranks of dp and cp
    sp: bool = False  # sequence parallelism over the ranks of tp

    @property
    def ranks(self) -> int:
        """Number of processes of the trainer."""
        return self.tp * self.pp * self.cp * self.dp


def check_fit(
    architecture: Architecture,
    layout: ParallelLayout,
    layers: str = "local",
    targets: Collection[Projection] = (),
    fp8: Fp8Recipe | None = None,
) -> None:
    """Check that a model can be trained in a parallel layout, with these layers and adapters.

    Args:
        architecture: architecture of the model.
        layout: layout of its trainer.
        layers: implementation of the linear layers, "local" or "te" (Transformer Engine).
        targets: projections that get adapters; none if all weights are trained.
        fp8: recipe of the layers' products in FP8; None: they are not in FP8.

    Raises:
        ModelError: the model cannot be trained so; the message says which settings fit.
    """
    _check_tensor_parallelism(architecture, layout)
    _check_pipeline_parallelism(architecture, layout)
    if layout.sp and layout.tp == 1:
        raise ModelError("sp: sequence parallelism needs tp of 2 or more; use sp: false, or tp: 2")
    if architecture.experts is None and layout.ep > 1:
        raise ModelError(
            f"ep: {layout.ep} needs a mixture of experts, and this model has no experts; use ep: 1 "
            "(dp replicates the model)"
        )
    if layers == "te":
        _check_transformer_engine(targets)
    if fp8 is not None:
        _check_fp8(architecture, layout, fp8)
    if architecture.experts is not None:
        _check_experts(architecture.experts, layout, targets)


def _check_tensor_parallelism(architecture: Architecture, layout: ParallelLayout) -> None:
    """Check that tensor- and context-parallel ranks get equal shares of heads and widths."""
    tp = layout.tp
    cp = layout.cp
    sizes = {
        "heads": architecture.heads,
        "key/value heads": architecture.kv_heads,
        "feed-forward width": architecture.ffn,
    }
    if architecture.experts is not None:
        sizes["expert width"] = architecture.experts.ffn
    for size_name, size in sizes.items():
        if size % tp:
            _refuse(f"tp: {tp} does not divide the model's {size} {size_name}", tp, *sizes.values())

    heads_per_rank = architecture.heads // tp
    if heads_per_rank % cp:
        _refuse(
            f"cp: {cp} does not divide the {heads_per_rank} heads that tp: {tp} leaves to each rank",
            cp,
            heads_per_rank,
        )


def _check_pipeline_parallelism(architecture: Architecture, layout: ParallelLayout) -> None:
    """Check that all pipeline stages get the same number of layers."""
    pp = layout.pp
    vpp = layout.vpp
    if architecture.layers % (pp * vpp):
        stages = f"pp: {pp}" if vpp == 1 else f"pp · vpp: {pp} · {vpp}"
        _refuse(
            f"{stages} does not divide the model's {architecture.layers} layers",
            pp * vpp,
            architecture.layers,
        )
    if vpp > 1 and pp == 1:
        raise ModelError(
            f"vpp: {vpp} stages on each pipeline rank need pp of 2 or more; use vpp: 1, or pp: 2"
        )


def _check_transformer_engine(targets: Collection[Projection]) -> None:
    """Check that Transformer Engine is installed, and that no adapters are trained with it."""
    if targets:
        raise ModelError(
            "lora cannot be used with layers: te, because Transformer Engine's linear layers "
            "contain the norm before them, and an adapter would get inputs without it; use "
            "layers: local"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModelError(
            "layers: te needs Transformer Engine, which is not installed here; use layers: local, "
            "or install transformer-engine[pytorch]"
        )


def _check_fp8(architecture: Architecture, layout: ParallelLayout, recipe: Fp8Recipe) -> None:
    """Check that the widths of a rank's products are multiples of the number that FP8 needs."""
    tp = layout.tp
    head_dim = architecture.head_dim
    widths = {
        "hidden width": architecture.hidden,
        "width of queries, keys and values": (architecture.heads + 2 * architecture.kv_heads)
        * head_dim
        // tp,
        "width of attention": architecture.heads * head_dim // tp,
        "feed-forward width": architecture.ffn // tp,
    }
    if architecture.experts is not None:
        widths["expert width"] = architecture.experts.ffn // tp
    multiple = FP8_MULTIPLES[recipe]
    for name, width in widths.items():
        if width % multiple:
            raise ModelError(
                f"fp8_recipe: {recipe} needs multiples of {multiple}, and the model's {name} is {width} "
                f"on each rank of tp: {tp}; use a smaller tp, another fp8_recipe, or fp8: null"
            )


def _check_experts(
    experts: Experts, layout: ParallelLayout, targets: Collection[Projection]
) -> None:
    """Check that a mixture of experts can be trained in a layout, with these adapters."""
    tp = layout.tp
    ep = layout.ep
    if experts.per_token == 1 and experts.normalised:
        raise ModelError(
            "norm_topk_prob with num_experts_per_tok: 1 gives every expert the weight 1, so the "
            "router cannot learn"
        )

    # The experts of a layer are divided among ranks that have the same part of the model.
    replicas = layout.dp * layout.cp
    if experts.count % ep or replicas % ep:
        _refuse(
            f"ep: {ep} must divide the model's {experts.count} experts, and the "
            f"dp · cp = {replicas} ranks that share them",
            ep,
            experts.count,
            replicas,
        )
    if tp > 1 and not layout.sp:
        raise ModelError(
            f"tp: {tp} on a mixture of experts needs sequence parallelism; use sp: true, or tp: 1"
        )

    expert_targets = [target for target in targets if target not in ATTENTION_PROJECTIONS]
    if expert_targets:
        raise ModelError(
            f"lora.targets: in a mixture of experts, {', '.join(expert_targets)} belong to the "
            "experts, which take no adapters; use "
            f"targets: [{', '.join(ATTENTION_PROJECTIONS)}], or some of them"
        )


def _refuse(reason: str, requested: int, *sizes: int) -> NoReturn:
    """Raise ModelError with a reason, and name the numbers that divide all `sizes`."""
    valid = [
        number for number in range(1, min(sizes) + 1) if all(size % number == 0 for size in sizes)
    ]
    nearest = min(valid, key=lambda number: abs(number - requested))
    raise ModelError(f"{reason}; valid here: {valid}, nearest: {nearest}")
