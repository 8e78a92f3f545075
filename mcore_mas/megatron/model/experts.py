"""A mixture of experts as its Hugging Face config.json describes it, and how its ranks may share it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_mas.megatron.spec import Projection

_ATTENTION: tuple[Projection, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of the sparse layers; there is no shared expert."""

    count: int  # E, of one layer
    per_token: int  # k, that see a token
    ffn: int  # of one expert
    normalised: bool  # the k probabilities are scaled to a sum of 1; else they are what softmax over all E gives
    sparse: tuple[bool, ...]  # by layer; the others have a dense feed-forward part

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Experts:
        """From the config.json of a Qwen3-MoE, as transformers 4 or 5 writes it."""
        # transformers 5 writes the count under the name that all its mixtures share
        count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
        dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        return cls(
            count=count,
            per_token=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            normalised=config.get("norm_topk_prob", False),
            sparse=tuple(
                layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"])
            ),
        )

    def refusal(self, *, tp: int, dp: int, ep: int, sp: bool, cp: int = 1) -> str | None:
        """Why these sizes cannot train this mixture, with the nearest that can; None if they can."""
        if self.per_token == 1 and self.normalised:
            return "norm_topk_prob with num_experts_per_tok: 1 gives every expert weight 1, so its router cannot learn"
        ranks = dp * cp  # that hold whole layers, each with tokens of its own
        valid = [n for n in range(1, self.count + 1) if self.count % n == 0 and ranks % n == 0]
        if ep not in valid:
            near = min(valid, key=lambda size: abs(size - ep))
            return (
                f"ep: {ep} must divide the model's {self.count} experts, and dp · cp: {ranks}, whose ranks share them; "
                f"valid here: {valid}, nearest: {near}"
            )
        if tp > 1 and not sp:
            return f"tp: {tp} on a mixture of experts cuts by sequence too; use sp: true, or tp: 1"
        return None

    def adapter_refusal(self, targets: Collection[Projection]) -> str | None:
        """Why adapters on these projections cannot train this mixture; None if they can."""
        refused = [x for x in targets if x not in _ATTENTION]
        if not refused:
            return None
        return (
            f"lora.targets: {', '.join(refused)} of a mixture of experts are its experts', which take no adapters; "
            f"use targets: [{', '.join(_ATTENTION)}], or some of them"
        )
