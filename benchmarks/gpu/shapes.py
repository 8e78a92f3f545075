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
# of 30B-A3B 2 of its 48 layers
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
    """A folder with the config.json of one of `MODELS`, whose weights are to be drawn at random."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960} | MODELS[
        name
    ]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


Forest = list[
    tuple[int, int, int]
]  # of each segment, depth first: tokens, parent (-1: a root), rows to train


def _groups() -> Forest:
    """4 prompts of 512 tokens, 8 replies each."""
    replies = (350, 380, 402, 430, 455, 480, 541, 546)
    return [row for g in range(4) for row in [(512, -1, 0), *((n, 9 * g, n) for n in replies)]]


def _turns() -> Forest:
    """4 prompts, 8 trajectories each, of 8 turns of 20 to 90 tokens; half of a turn is the reply."""
    draw, found = random.Random(0), []
    for _ in range(4):
        root = len(found)
        found.append((400, -1, 0))
        for _ in range(8):
            parent = root
            for _ in range(8):
                tokens = draw.randint(20, 90)
                found.append((tokens, parent, tokens // 2))
                parent = len(found) - 1
    return found


def _branches() -> Forest:
    """2 prompts, each a tree of width 4 and depth 4 (AT-GRPO)."""
    draw, found = random.Random(0), []

    def grow(parent: int, levels: int) -> None:
        for _ in range(4 if levels else 0):
            tokens = draw.randint(30, 60)
            found.append((tokens, parent, tokens))
            grow(len(found) - 1, levels - 1)

    for _ in range(2):
        found.append((400, -1, 0))
        grow(len(found) - 1, 4)
    return found


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
    """A micro-batch of that layout with random tokens, sampled as a random model does, and advantages of ±1."""
    draw = torch.Generator().manual_seed(seed)
    segments = tuple(Segment(tokens=tokens, parent=parent) for tokens, parent, _ in forest)
    starts = torch.tensor([0, *(s.tokens for s in segments)]).cumsum(0)
    positions = [
        torch.arange(above, above + s.tokens)
        for s, above in zip(segments, depths(segments), strict=True)
    ]
    rows = [
        torch.arange(int(start) + tokens - n, int(start) + tokens)
        for start, (tokens, _, n) in zip(starts[:-1], forest, strict=True)
    ]
    predictors = torch.cat(rows)
    count = len(predictors)
    zeros = torch.zeros(count)
    return Microbatch(
        agent=agent,
        segments=segments,
        unshared=int(starts[-1]),
        token_ids=torch.randint(vocab, (int(starts[-1]),), generator=draw),
        position_ids=torch.cat(positions),
        predictors=predictors,
        labels=torch.randint(vocab, (count,), generator=draw),
        temperatures=torch.ones(count),
        sequences=torch.cat([torch.full((len(own),), i) for i, own in enumerate(rows)]),
        behaviour=zeros - math.log(vocab),
        advantages=torch.randint(2, (count,), generator=draw) * 2.0 - 1.0,
        weights=zeros + 1.0 / count,
        kl_coef=zeros.clone(),
        entropy_coef=zeros.clone(),
    )


def operations(folder: Path, batch: Microbatch) -> float:
    """Floating-point operations of an update, forward and backward, recomputation not counted."""
    return CostModel(architecture=read_architecture(folder)).flops(batch)


# updates that are measured where there is room, and predicted by the meter; on 80 GB those of 4b that recompute all
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
    """The latest line of a section for a case."""
    wanted = (
        case if section != "meter" else {"recompute": "none", **case}
    )  # the meter says it of all
    return next(
        (x for x in reversed(lines) if x["section"] == section and wanted.items() <= x.items()),
        None,
    )
