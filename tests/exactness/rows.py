"""What is trained, row by row: layouts, models, and ways to feed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel, Microbatch
from mcore_mas.packing.pack import pack
from rollout.models.layout import Projection
from tests.support import ranks

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout, and one way to feed it."""

    name: str
    family: str = "qwen2"
    layout: dict[str, Any] = field(default_factory=dict)  # of the TrainerSpec
    feed: str = "tree"  # in FEEDS
    max_tokens: int = 16  # of a micro-batch
    critic: bool = False
    lora: tuple[Projection, ...] = ()  # targets of adapters; none: all weights are trained
    beside: bool = (
        False  # on the frozen model of another policy's adapters, which is trained in turn with it
    )
    deep: bool = False  # trained on turns that share three levels of beginnings
    ci: bool = True  # measured by `make test` too

    @property
    def ranks(self) -> int:
        """Processes."""
        return ranks.make_spec("", **self.layout).ranks

    @property
    def model(self) -> str:
        """The folder of its model, which rows share."""
        name = f"{self.family}_critic" if self.critic else self.family
        return "_".join((name, "lora", *self.lora)) if self.lora else name

    @property
    def task(self) -> tuple[str, bool]:
        """Its model, and whether its samples are those of depth 3: what rows that must agree have in common."""
        return self.model, self.deep


FEEDS: dict[str, Callable[[list[Sample], int, CostModel], list[Microbatch]]] = {
    "tree": pack,
    "as for one rank": lambda samples, max_tokens, shares: pack(samples, max_tokens),
    "linear": partial(pack, share=False),
    "permuted": lambda samples, max_tokens, shares: pack(samples[::-1], max_tokens, shares),
}

_ATTENTION: tuple[Projection, ...] = ("q", "k", "v", "o")
_ALL = {"tp": 2, "pp": 2, "sp": True}

ROWS = (
    Row(name="one rank", max_tokens=1000),
    Row(name="TP2", layout={"tp": 2}),
    Row(name="TP2, Qwen3", family="qwen3", layout={"tp": 2}, ci=False),
    Row(name="TP2, Llama 3", family="llama", layout={"tp": 2}, ci=False),
    Row(name="TP2 + SP", layout={"tp": 2, "sp": True}),
    Row(name="TP2 + SP, Qwen3", family="qwen3", layout={"tp": 2, "sp": True}, ci=False),
    Row(name="TP2 + SP, Llama 3", family="llama", layout={"tp": 2, "sp": True}, ci=False),
    Row(name="TP2 + SP, recompute", layout={"tp": 2, "sp": True, "recompute": "full"}),
    Row(name="PP2", layout={"pp": 2}),
    Row(name="PP2, Qwen3 (head of its own)", family="qwen3", layout={"pp": 2}, ci=False),
    Row(name="PP2, recompute", layout={"pp": 2, "recompute": "full"}, ci=False),
    Row(name="PP2 × 2 stages", layout={"pp": 2, "vpp": 2}),
    Row(name="TP2 × PP2", layout={"tp": 2, "pp": 2}),
    Row(name="TP2 × PP2 + SP", layout={"tp": 2, "pp": 2, "sp": True}, ci=False),
    Row(name="CP2", layout={"cp": 2}, max_tokens=1000),
    Row(name="CP2, Qwen3", family="qwen3", layout={"cp": 2}, max_tokens=1000, ci=False),
    Row(name="CP4, key/value heads shared", layout={"cp": 4}, max_tokens=1000, ci=False),
    Row(name="CP2, recompute", layout={"cp": 2, "recompute": "full"}, max_tokens=1000, ci=False),
    Row(name="TP2 × CP2 + SP", layout={"tp": 2, "cp": 2, "sp": True}, ci=False),
    Row(name="PP2 × CP2", layout={"pp": 2, "cp": 2}, ci=False),
    Row(name="PP2 × CP2, two stages each", layout={"pp": 2, "cp": 2, "vpp": 2}, ci=False),
    Row(
        name="CP2 + distributed optimizer",
        layout={"cp": 2, "distributed_optimizer": True},
        max_tokens=1000,
        ci=False,
    ),
    Row(
        name="CP2 × DP2 + distributed optimizer",
        layout={"cp": 2, "dp": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(name="critic, CP2", critic=True, layout={"cp": 2}, ci=False),
    Row(name="DP2", layout={"dp": 2}),
    Row(
        name="DP2, fewer micro-batches than ranks",
        layout={"dp": 2},
        feed="as for one rank",
        max_tokens=1000,
    ),
    Row(name="DP4", layout={"dp": 4}, ci=False),
    Row(name="DP2 + distributed optimizer", layout={"dp": 2, "distributed_optimizer": True}),
    Row(
        name="DP2 + distributed optimizer, overlap",
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
    ),
    Row(name="DP2, overlap", layout={"dp": 2, "overlap": True, "bucket": 10_000}, ci=False),
    Row(
        name="PP2 × DP2, two stages each + distributed optimizer, overlap",
        layout={"pp": 2, "vpp": 2, "dp": 2, "distributed_optimizer": True, "overlap": True},
        ci=False,
    ),
    Row(
        name="TP2 × DP2 + SP + distributed optimizer",
        layout={"tp": 2, "dp": 2, "sp": True, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="PP2 × DP2 + distributed optimizer",
        layout={"pp": 2, "dp": 2, "distributed_optimizer": True},
    ),
    Row(name="Qwen3-MoE", family="qwen3_moe", ci=False),
    Row(name="Qwen3-MoE, TP2 + SP", family="qwen3_moe", layout={"tp": 2, "sp": True}, ci=False),
    Row(name="Qwen3-MoE, DP2 × EP2", family="qwen3_moe", layout={"dp": 2, "ep": 2}),
    Row(name="Qwen3-MoE, PP2", family="qwen3_moe", layout={"pp": 2}, ci=False),
    Row(
        name="Qwen3-MoE, DP4 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"dp": 4, "ep": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="Qwen3-MoE, DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"dp": 2, "ep": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(name="Qwen3-MoE, recompute", family="qwen3_moe", layout={"recompute": "full"}, ci=False),
    Row(name="Qwen3-MoE, PP2 × 2 stages", family="qwen3_moe", layout={"pp": 2, "vpp": 2}, ci=False),
    Row(
        name="Qwen3-MoE, PP2 × DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"pp": 2, "dp": 2, "ep": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="Qwen3-MoE, TP2 × DP2 × EP2 + SP",
        family="qwen3_moe",
        layout={"tp": 2, "dp": 2, "ep": 2, "sp": True},
        ci=False,
    ),
    Row(
        name="Qwen3-MoE, DP2 × EP2 + distributed optimizer, overlap",
        family="qwen3_moe",
        layout={"dp": 2, "ep": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
        ci=False,
    ),
    Row(name="Qwen3-MoE, CP2", family="qwen3_moe", layout={"cp": 2}, max_tokens=1000, ci=False),
    Row(name="Qwen3-MoE, CP2 × EP2", family="qwen3_moe", layout={"cp": 2, "ep": 2}),
    Row(
        name="Qwen3-MoE, CP2 × DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"cp": 2, "dp": 2, "ep": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o, TP2 × DP2 × EP2 + SP",
        family="qwen3_moe",
        lora=_ATTENTION,
        layout={"tp": 2, "dp": 2, "ep": 2, "sp": True},
        ci=False,
    ),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o",
        family="qwen3_moe",
        lora=_ATTENTION,
        max_tokens=1000,
        ci=False,
    ),
    Row(
        name="Qwen3-MoE critic, DP2 × EP2",
        family="qwen3_moe",
        critic=True,
        layout={"dp": 2, "ep": 2},
        ci=False,
    ),
    Row(name="nothing shared", feed="linear", max_tokens=1000, ci=False),
    Row(name="trees of depth 3", deep=True, max_tokens=1000, ci=False),
    Row(name="trees of depth 3, cut to at most 48 tokens", deep=True, max_tokens=48, ci=False),
    Row(name="trees of depth 3, TP2 + SP", deep=True, layout={"tp": 2, "sp": True}, max_tokens=64),
    Row(name="trees of depth 3, PP2", deep=True, layout={"pp": 2}, max_tokens=64),
    Row(
        name="trees of depth 3, PP2 × DP2",
        deep=True,
        layout={"pp": 2, "dp": 2},
        max_tokens=64,
        ci=False,
    ),
    Row(
        name="trees of depth 3, Qwen3, TP2 × PP2 + SP",
        family="qwen3",
        deep=True,
        layout=_ALL,
        max_tokens=64,
        ci=False,
    ),
    Row(
        name="trees of depth 3, Qwen3-MoE, DP2 × EP2",
        family="qwen3_moe",
        deep=True,
        layout={"dp": 2, "ep": 2},
        max_tokens=64,
        ci=False,
    ),
    Row(name="depth 3, nothing shared", deep=True, feed="linear", max_tokens=1000, ci=False),
    Row(name="permuted samples", feed="permuted", max_tokens=1000, ci=False),
    Row(name="micro-batches of at most 40 tokens", max_tokens=40, ci=False),
    Row(name="micro-batches of one sequence", max_tokens=1, ci=False),
    Row(name="critic", critic=True, max_tokens=1000, ci=False),
    Row(name="critic, TP2 + SP", critic=True, layout={"tp": 2, "sp": True}),
    Row(name="critic, PP2", critic=True, layout={"pp": 2}, ci=False),
    Row(
        name="critic, DP2 + distributed optimizer",
        critic=True,
        layout={"dp": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(name="LoRA", lora=PROJECTIONS, max_tokens=1000, ci=False),
    Row(name="LoRA, TP2", lora=PROJECTIONS, layout={"tp": 2}),
    Row(name="LoRA, TP2 + SP", lora=PROJECTIONS, layout={"tp": 2, "sp": True}, ci=False),
    Row(
        name="LoRA, TP2 + SP, recompute",
        lora=PROJECTIONS,
        layout={"tp": 2, "sp": True, "recompute": "full"},
        ci=False,
    ),
    Row(
        name="LoRA on q, v, up, TP2, Qwen3",
        family="qwen3",
        lora=("q", "v", "up"),
        layout={"tp": 2},
        ci=False,
    ),
    Row(name="LoRA, PP2", lora=PROJECTIONS, layout={"pp": 2}, ci=False),
    Row(
        name="LoRA, PP2, recompute",
        lora=PROJECTIONS,
        layout={"pp": 2, "recompute": "full"},
        ci=False,
    ),
    Row(
        name="LoRA, DP2 + distributed optimizer",
        lora=PROJECTIONS,
        layout={"dp": 2, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="LoRA, TP2 × DP2 + SP + distributed optimizer",
        lora=PROJECTIONS,
        layout={"tp": 2, "dp": 2, "sp": True, "distributed_optimizer": True},
        ci=False,
    ),
    Row(
        name="LoRA, DP2 + distributed optimizer, overlap",
        lora=PROJECTIONS,
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 2_000},
        ci=False,
    ),
    Row(name="LoRA, CP2", lora=PROJECTIONS, layout={"cp": 2}, ci=False),
    Row(name="LoRA beside another on one base", lora=PROJECTIONS, beside=True, ci=False),
    Row(
        name="LoRA beside another on one base, TP2 + SP",
        lora=PROJECTIONS,
        beside=True,
        layout={"tp": 2, "sp": True},
        ci=False,
    ),
    Row(
        name="LoRA beside another on one base, PP2",
        lora=PROJECTIONS,
        beside=True,
        layout={"pp": 2},
        ci=False,
    ),
    Row(
        name="LoRA critic, TP2 + SP",
        critic=True,
        lora=PROJECTIONS,
        layout={"tp": 2, "sp": True},
        ci=False,
    ),
)
