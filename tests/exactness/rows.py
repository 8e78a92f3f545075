"""Rows of docs/exactness.md: layouts, models, and ways to pack the samples."""

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
    """A layout that is trained, its model and its micro-batches.

    Attributes:
        name: in the table.
        family: of the model.
        layout: fields of the `TrainerSpec`.
        feed: key of `FEEDS`.
        max_tokens: of a micro-batch.
        critic: True to train a critic.
        lora: projections with adapters; none: train all weights.
        shared_base: True to train on the frozen weights of another trainer of adapters, which is
            trained in turn with this one.
        balance: weight of each agent in the balanced gradient; None: the gradient is not balanced.
        deep: True to train on turns whose sequences share prefixes at two levels (trees of depth 3).
        tested: True if the tests measure it too.
    """

    name: str
    family: str = "qwen2"
    layout: dict[str, Any] = field(default_factory=dict)
    feed: str = "tree"
    max_tokens: int = 16
    critic: bool = False
    lora: tuple[Projection, ...] = ()
    shared_base: bool = False
    balance: dict[str, float] | None = None
    deep: bool = False
    tested: bool = True

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return ranks.make_spec("", **self.layout).ranks

    @property
    def model(self) -> str:
        """Name of the model's folder; rows with the same model share it."""
        name = f"{self.family}_critic" if self.critic else self.family
        return "_".join((name, "lora", *self.lora)) if self.lora else name

    @property
    def task(self) -> tuple[str, bool, bool]:
        """Name of the model, True if the samples are deep, and True if the gradient is balanced.

        Rows with the same task must have equal results.
        """
        return self.model, self.deep, self.balance is not None


# Functions of samples, maximum tokens and cost model that make micro-batches.
FEEDS: dict[str, Callable[[list[Sample], int, CostModel], list[Microbatch]]] = {
    "tree": pack,
    "as for one rank": lambda samples, max_tokens, cost: pack(samples, max_tokens),
    "linear": partial(pack, share=False),
    "permuted": lambda samples, max_tokens, cost: pack(samples[::-1], max_tokens, cost),
}

_ATTENTION: tuple[Projection, ...] = ("q", "k", "v", "o")
# Without balance, agent a has 0.58 and agent b 0.42 of the norms of `reference.make_samples`.
BALANCE = {"a": 3.0, "b": 1.0}
_TP_PP_SP = {"tp": 2, "pp": 2, "sp": True}

ROWS = (
    Row(name="one rank", max_tokens=1000),
    Row(name="TP2", layout={"tp": 2}, tested=False),
    Row(name="TP2, Qwen3", family="qwen3", layout={"tp": 2}, tested=False),
    Row(name="TP2, Llama 3", family="llama", layout={"tp": 2}, tested=False),
    Row(name="TP2 + SP", layout={"tp": 2, "sp": True}, tested=False),
    Row(name="TP2 + SP, Qwen3", family="qwen3", layout={"tp": 2, "sp": True}, tested=False),
    Row(name="TP2 + SP, Llama 3", family="llama", layout={"tp": 2, "sp": True}, tested=False),
    Row(name="TP2 + SP, recompute", layout={"tp": 2, "sp": True, "recompute": "full"}),
    Row(name="PP2", layout={"pp": 2}, tested=False),
    Row(name="PP2, Qwen3 (head of its own)", family="qwen3", layout={"pp": 2}, tested=False),
    Row(name="PP2, recompute", layout={"pp": 2, "recompute": "full"}, tested=False),
    Row(name="PP2 × 2 stages", layout={"pp": 2, "vpp": 2}),
    Row(name="TP2 × PP2", layout={"tp": 2, "pp": 2}),
    Row(name="TP2 × PP2 + SP", layout={"tp": 2, "pp": 2, "sp": True}, tested=False),
    Row(name="CP2", layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(name="CP2, Qwen3", family="qwen3", layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(name="CP4, key/value heads shared", layout={"cp": 4}, max_tokens=1000, tested=False),
    Row(
        name="CP2, recompute", layout={"cp": 2, "recompute": "full"}, max_tokens=1000, tested=False
    ),
    Row(name="TP2 × CP2 + SP", layout={"tp": 2, "cp": 2, "sp": True}, tested=False),
    Row(name="PP2 × CP2", layout={"pp": 2, "cp": 2}, tested=False),
    Row(name="PP2 × CP2, two stages each", layout={"pp": 2, "cp": 2, "vpp": 2}, tested=False),
    Row(
        name="CP2 + distributed optimizer",
        layout={"cp": 2, "distributed_optimizer": True},
        max_tokens=1000,
        tested=False,
    ),
    Row(
        name="CP2 × DP2 + distributed optimizer",
        layout={"cp": 2, "dp": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(name="critic, CP2", critic=True, layout={"cp": 2}, tested=False),
    Row(name="DP2", layout={"dp": 2}, tested=False),
    Row(
        name="DP2, fewer micro-batches than ranks",
        layout={"dp": 2},
        feed="as for one rank",
        max_tokens=1000,
    ),
    Row(name="DP4", layout={"dp": 4}, tested=False),
    Row(
        name="DP2 + distributed optimizer",
        layout={"dp": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="DP2 + distributed optimizer, overlap",
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
    ),
    Row(name="DP2, overlap", layout={"dp": 2, "overlap": True, "bucket": 10_000}, tested=False),
    Row(
        name="PP2 × DP2, two stages each + distributed optimizer, overlap",
        layout={"pp": 2, "vpp": 2, "dp": 2, "distributed_optimizer": True, "overlap": True},
        tested=False,
    ),
    Row(
        name="TP2 × DP2 + SP + distributed optimizer",
        layout={"tp": 2, "dp": 2, "sp": True, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="PP2 × DP2 + distributed optimizer",
        layout={"pp": 2, "dp": 2, "distributed_optimizer": True},
    ),
    Row(name="Qwen3-MoE", family="qwen3_moe", tested=False),
    Row(name="Qwen3-MoE, TP2 + SP", family="qwen3_moe", layout={"tp": 2, "sp": True}, tested=False),
    Row(name="Qwen3-MoE, DP2 × EP2", family="qwen3_moe", layout={"dp": 2, "ep": 2}),
    Row(name="Qwen3-MoE, PP2", family="qwen3_moe", layout={"pp": 2}, tested=False),
    Row(
        name="Qwen3-MoE, DP4 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"dp": 4, "ep": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"dp": 2, "ep": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, recompute", family="qwen3_moe", layout={"recompute": "full"}, tested=False
    ),
    Row(
        name="Qwen3-MoE, PP2 × 2 stages",
        family="qwen3_moe",
        layout={"pp": 2, "vpp": 2},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, PP2 × DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"pp": 2, "dp": 2, "ep": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, TP2 × DP2 × EP2 + SP",
        family="qwen3_moe",
        layout={"tp": 2, "dp": 2, "ep": 2, "sp": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, DP2 × EP2 + distributed optimizer, overlap",
        family="qwen3_moe",
        layout={"dp": 2, "ep": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
        tested=False,
    ),
    Row(name="Qwen3-MoE, CP2", family="qwen3_moe", layout={"cp": 2}, max_tokens=1000, tested=False),
    Row(name="Qwen3-MoE, CP2 × EP2", family="qwen3_moe", layout={"cp": 2, "ep": 2}),
    Row(
        name="Qwen3-MoE, CP2 × DP2 × EP2 + distributed optimizer",
        family="qwen3_moe",
        layout={"cp": 2, "dp": 2, "ep": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o, TP2 × DP2 × EP2 + SP",
        family="qwen3_moe",
        lora=_ATTENTION,
        layout={"tp": 2, "dp": 2, "ep": 2, "sp": True},
        tested=False,
    ),
    Row(
        name="Qwen3-MoE, LoRA on q, k, v, o",
        family="qwen3_moe",
        lora=_ATTENTION,
        max_tokens=1000,
        tested=False,
    ),
    Row(
        name="Qwen3-MoE critic, DP2 × EP2",
        family="qwen3_moe",
        critic=True,
        layout={"dp": 2, "ep": 2},
        tested=False,
    ),
    Row(name="nothing shared", feed="linear", max_tokens=1000, tested=False),
    Row(name="trees of depth 3", deep=True, max_tokens=1000, tested=False),
    Row(name="trees of depth 3, cut to at most 48 tokens", deep=True, max_tokens=48, tested=False),
    Row(name="trees of depth 3, TP2 + SP", deep=True, layout={"tp": 2, "sp": True}, max_tokens=64),
    Row(name="trees of depth 3, PP2", deep=True, layout={"pp": 2}, max_tokens=64, tested=False),
    Row(
        name="trees of depth 3, PP2 × DP2",
        deep=True,
        layout={"pp": 2, "dp": 2},
        max_tokens=64,
        tested=False,
    ),
    Row(name="trees of depth 3, CP2", deep=True, layout={"cp": 2}, max_tokens=1000),
    Row(
        name="trees of depth 3, CP2, cut to at most 48 tokens",
        deep=True,
        layout={"cp": 2},
        max_tokens=48,
        tested=False,
    ),
    Row(
        name="trees of depth 3, CP4, key/value heads shared",
        deep=True,
        layout={"cp": 4},
        max_tokens=1000,
        tested=False,
    ),
    Row(
        name="trees of depth 3, TP2 × CP2 + SP",
        deep=True,
        layout={"tp": 2, "cp": 2, "sp": True},
        max_tokens=64,
        tested=False,
    ),
    Row(
        name="trees of depth 3, Qwen3, TP2 × PP2 + SP",
        family="qwen3",
        deep=True,
        layout=_TP_PP_SP,
        max_tokens=64,
        tested=False,
    ),
    Row(
        name="trees of depth 3, Qwen3-MoE, DP2 × EP2",
        family="qwen3_moe",
        deep=True,
        layout={"dp": 2, "ep": 2},
        max_tokens=64,
        tested=False,
    ),
    Row(name="depth 3, nothing shared", deep=True, feed="linear", max_tokens=1000, tested=False),
    Row(name="balanced agents", balance=BALANCE, max_tokens=1000, tested=False),
    Row(name="balanced agents, TP2 + SP", balance=BALANCE, layout={"tp": 2, "sp": True}),
    Row(name="balanced agents, PP2", balance=BALANCE, layout={"pp": 2}),
    Row(
        name="balanced agents, CP2",
        balance=BALANCE,
        layout={"cp": 2},
        max_tokens=1000,
        tested=False,
    ),
    Row(
        name="balanced agents, DP2 + distributed optimizer, overlap",
        balance=BALANCE,
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
    ),
    Row(
        name="balanced agents, TP2 × PP2 + SP",
        balance=BALANCE,
        layout=_TP_PP_SP,
        tested=False,
    ),
    Row(
        name="balanced agents, trees of depth 3, PP2 × DP2",
        balance=BALANCE,
        deep=True,
        layout={"pp": 2, "dp": 2},
        max_tokens=64,
        tested=False,
    ),
    Row(
        name="balanced agents, LoRA, TP2",
        balance=BALANCE,
        lora=PROJECTIONS,
        layout={"tp": 2},
        tested=False,
    ),
    Row(
        name="balanced agents, Qwen3-MoE, DP2 × EP2",
        balance=BALANCE,
        family="qwen3_moe",
        layout={"dp": 2, "ep": 2},
        tested=False,
    ),
    Row(name="permuted samples", feed="permuted", max_tokens=1000, tested=False),
    Row(name="micro-batches of at most 40 tokens", max_tokens=40, tested=False),
    Row(name="micro-batches of one sequence", max_tokens=1, tested=False),
    Row(name="critic", critic=True, max_tokens=1000, tested=False),
    Row(name="critic, TP2 + SP", critic=True, layout={"tp": 2, "sp": True}),
    Row(name="critic, PP2", critic=True, layout={"pp": 2}, tested=False),
    Row(
        name="critic, DP2 + distributed optimizer",
        critic=True,
        layout={"dp": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(name="LoRA", lora=PROJECTIONS, max_tokens=1000, tested=False),
    Row(name="LoRA, TP2", lora=PROJECTIONS, layout={"tp": 2}),
    Row(name="LoRA, TP2 + SP", lora=PROJECTIONS, layout={"tp": 2, "sp": True}, tested=False),
    Row(
        name="LoRA, TP2 + SP, recompute",
        lora=PROJECTIONS,
        layout={"tp": 2, "sp": True, "recompute": "full"},
        tested=False,
    ),
    Row(
        name="LoRA on q, v, up, TP2, Qwen3",
        family="qwen3",
        lora=("q", "v", "up"),
        layout={"tp": 2},
        tested=False,
    ),
    Row(name="LoRA, PP2", lora=PROJECTIONS, layout={"pp": 2}, tested=False),
    Row(
        name="LoRA, PP2, recompute",
        lora=PROJECTIONS,
        layout={"pp": 2, "recompute": "full"},
        tested=False,
    ),
    Row(
        name="LoRA, DP2 + distributed optimizer",
        lora=PROJECTIONS,
        layout={"dp": 2, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="LoRA, TP2 × DP2 + SP + distributed optimizer",
        lora=PROJECTIONS,
        layout={"tp": 2, "dp": 2, "sp": True, "distributed_optimizer": True},
        tested=False,
    ),
    Row(
        name="LoRA, DP2 + distributed optimizer, overlap",
        lora=PROJECTIONS,
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 2_000},
        tested=False,
    ),
    Row(name="LoRA, CP2", lora=PROJECTIONS, layout={"cp": 2}, tested=False),
    Row(name="LoRA beside another on one base", lora=PROJECTIONS, shared_base=True, tested=False),
    Row(
        name="LoRA beside another on one base, TP2 + SP",
        lora=PROJECTIONS,
        shared_base=True,
        layout={"tp": 2, "sp": True},
        tested=False,
    ),
    Row(
        name="LoRA beside another on one base, PP2",
        lora=PROJECTIONS,
        shared_base=True,
        layout={"pp": 2},
        tested=False,
    ),
    Row(
        name="LoRA critic, TP2 + SP",
        critic=True,
        lora=PROJECTIONS,
        layout={"tp": 2, "sp": True},
        tested=False,
    ),
)
