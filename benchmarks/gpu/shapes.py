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

_COLUMNS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_MORE = ("intermediate_size", "vocab_size", "tie_word_embeddings", "model_type")
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip((*_COLUMNS, *_MORE), sizes, strict=True))
    for name, sizes in {
        "tiny": (64, 2, 4, 2, 16, 128, 512, True, "qwen3"),
        "0.5b": (896, 24, 14, 2, 64, 4864, 151_936, True, "qwen2"),
        "1.7b": (2048, 28, 16, 8, 128, 6144, 151_936, True, "qwen3"),
        "4b": (2560, 36, 32, 8, 128, 9728, 151_936, True, "qwen3"),
    }.items()
}
# "30b-a3b" has 2 of the 48 layers of Qwen3-30B-A3B.
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
MODELS |= {
    "tiny-moe": MODELS["tiny"]
    | {"model_type": "qwen3_moe"}
    | dict(zip(_EXPERTS, (8, 2, 32, True), strict=True)),
    "30b-a3b": dict(
        zip(
            (*_COLUMNS, *_MORE, *_EXPERTS),
            (2048, 2, 32, 4, 128, 6144, 151_936, False, "qwen3_moe", 128, 8, 768, True),
            strict=True,
        )
    ),
}
TINY: list[dict[str, Any]] = [{"model": name, "layout": "small"} for name in ("tiny", "tiny-moe")]


def write_model(name: str, folder: Path) -> Path:
    """Write the config.json of one of `MODELS`, without weights, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960}
    config = common | MODELS[name]
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
    """Return 2 prompts, each with a tree of width 4 and depth 4 (AT-GRPO)."""
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


def of_case(
    lines: Sequence[dict[str, Any]], section: str, case: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the latest line of a section for a case, or None."""
    if section == "meter":
        case = {"recompute": "none", **case}  # the meter always writes this key
    for line in reversed(lines):
        if line["section"] == section and case.items() <= line.items():
            return line
    return None
