"""Models and micro-batches of published sizes, for the kit on a GPU and for the meter without one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_mas.megatron.batch import CostModel, Microbatch, Segment, depths
from rollout.models.architecture import read_architecture


def _model(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int = 151_936,
    tied: bool = True,
    model_type: str = "qwen3",
    **others: Any,
) -> dict[str, Any]:
    """Return the fields of a model's config.json that depend on its size."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "model_type": model_type,
        **others,
    }


_TINY = _model(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512)
_TINY_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# Fields of config.json, by name. "30b-a3b" has 2 of the 48 layers of Qwen3-30B-A3B.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "0.5b": _model(
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        ffn=4864,
        model_type="qwen2",
    ),
    "1.7b": _model(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=6144),
    "4b": _model(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=9728),
    "tiny-moe": _TINY | _TINY_EXPERTS,
    "30b-a3b": _model(
        hidden=2048,
        layers=2,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        tied=False,
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
TINY: list[dict[str, Any]] = [{"model": name, "layout": "small"} for name in ("tiny", "tiny-moe")]


def write_model(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the config.json of one of `MODELS`, without weights, and return the folder.

    Args:
        layers: number of layers; None for all of the model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960}
    config = common | MODELS[name]
    if layers is not None:
        config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# Tokens, parent (-1 for a root) and number of trained tokens of each segment, depth first.
Forest = list[tuple[int, int, int]]


def _groups() -> Forest:
    """Return 4 prompts of 512 tokens with 8 replies each."""
    replies = (350, 380, 402, 430, 455, 480, 541, 546)
    forest: Forest = []
    for _ in range(4):
        prompt = len(forest)
        forest.append((512, -1, 0))
        forest += [(tokens, prompt, tokens) for tokens in replies]
    return forest


def _turns() -> Forest:
    """Return 4 prompts with 8 trajectories each, of 8 turns of 20 to 90 tokens, half of which are the reply."""
    draw = random.Random(0)
    forest: Forest = []
    for _ in range(4):
        prompt = len(forest)
        forest.append((400, -1, 0))
        for _ in range(8):
            parent = prompt
            for _ in range(8):
                tokens = draw.randint(20, 90)
                forest.append((tokens, parent, tokens // 2))
                parent = len(forest) - 1
    return forest


def _branches() -> Forest:
    """Return 2 prompts, each the root of a full tree of 4 levels with 4 children per node.

    It branches more than a tree of AT-GRPO, in which only one branch of each level continues.
    """
    draw = random.Random(0)
    forest: Forest = []

    def add_children(parent: int, levels: int) -> None:
        if levels == 0:
            return
        for _ in range(4):
            tokens = draw.randint(30, 60)
            forest.append((tokens, parent, tokens))
            add_children(len(forest) - 1, levels - 1)

    for _ in range(2):
        forest.append((400, -1, 0))
        add_children(len(forest) - 1, levels=4)
    return forest


LAYOUTS: dict[str, Forest] = {
    "small": [(70, -1, 0), (33, 0, 33), (33, 0, 33), (1, 0, 1), (60, -1, 60), (17, 4, 17)],
    "groups": _groups(),
    "turns": _turns(),
    "branches": _branches(),
    "long": [(1000, -1, 0), *((3900 - 17 * i, 0, 3900 - 17 * i) for i in range(8))],
    "whole": [(4096, -1, 2048)] * 8,
}


def make_batch(
    forest: Sequence[tuple[int, int, int]], *, vocab: int, agent: str = "solver", seed: int = 0
) -> Microbatch:
    """Return a micro-batch of a forest with random tokens, uniform sampling probabilities and advantages of ±1."""
    draw = torch.Generator().manual_seed(seed)
    segments = tuple(Segment(tokens=tokens, parent=parent) for tokens, parent, _ in forest)
    starts = torch.tensor([0, *(segment.tokens for segment in segments)]).cumsum(0)
    positions = [
        torch.arange(depth, depth + segment.tokens)
        for segment, depth in zip(segments, depths(segments), strict=True)
    ]
    rows = []  # of each segment, the last tokens are trained
    for start, (tokens, _, trained) in zip(starts[:-1].tolist(), forest, strict=True):
        rows.append(torch.arange(start + tokens - trained, start + tokens))
    predictors = torch.cat(rows)
    count = len(predictors)
    zeros = torch.zeros(count)
    return Microbatch(
        agent=agent,
        segments=segments,
        tokens_without_sharing=int(starts[-1]),
        token_ids=torch.randint(vocab, (int(starts[-1]),), generator=draw),
        position_ids=torch.cat(positions),
        predictors=predictors,
        labels=torch.randint(vocab, (count,), generator=draw),
        temperatures=torch.ones(count),
        sequences=torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)]),
        behaviour=zeros - math.log(vocab),
        advantages=torch.randint(2, (count,), generator=draw) * 2.0 - 1.0,
        weights=zeros + 1.0 / count,
        kl_coef=zeros.clone(),
        entropy_coef=zeros.clone(),
    )


def operations(folder: Path, batch: Microbatch) -> float:
    """Return the floating-point operations of an update, forward and backward, without recomputation."""
    return CostModel(architecture=read_architecture(folder)).flops(batch)


# Updates that the meter predicts, and that are measured if the GPU has the memory; a GPU of 80 GB has
# it for those of "4b" with full recomputation.
CASES: list[dict[str, Any]] = [
    {"model": "4b", "layout": "groups", "recompute": "selective"},
    {"model": "4b", "layout": "turns", "recompute": "selective"},
    {"model": "4b", "layout": "groups", "recompute": "full"},
    {"model": "4b", "layout": "turns", "recompute": "full"},
    {"model": "1.7b", "layout": "turns"},
    {"model": "1.7b", "layout": "groups"},
    {"model": "1.7b", "layout": "branches"},
    {"model": "1.7b", "layout": "whole"},
    {"model": "30b-a3b", "layout": "groups", "recompute": "selective"},
    {"model": "0.5b", "layout": "groups"},
]
# Those that are also measured with `layers: te`, on a GPU of 80 GB.
TE_CASES: list[dict[str, Any]] = [
    {"model": "1.7b", "layout": "groups"},
    {"model": "1.7b", "layout": "turns"},
    {"model": "4b", "layout": "groups", "recompute": "full"},
    {"model": "0.5b", "layout": "groups"},
]


def line_of_case(
    lines: Sequence[dict[str, Any]], section: str, case: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the latest line of a section for a case, or None."""
    if section == "meter":
        case = {"recompute": "none", **case}  # the meter always writes this key
    for line in reversed(lines):
        if line["section"] == section and case.items() <= line.items():
            return line
    return None
