"""Exchanges of data-parallel ranks that overlap with computation change no bit of a training.

All gradients are in one bucket here. The distributed optimizer gives each rank a part of every bucket,
so with several buckets the norm of the gradient is a sum in another order: rows of
docs/exactness.md have buckets of a few parameters.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.config.policy import LoraConfig
from tests.support import ranks, reference

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

STEPS = 2
SHARDED = {"distributed_optimizer": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP2": ("qwen2", {"dp": 2}),
    "DP2 + distributed optimizer, bfloat16": ("qwen3", {"dp": 2, "bf16": True, **SHARDED}),
    "TP2 × DP2 + SP + distributed optimizer": (
        "qwen3",
        {"tp": 2, "dp": 2, "sp": True, **SHARDED},
    ),
    "PP2 × DP2 + distributed optimizer": ("qwen2", {"pp": 2, "dp": 2, **SHARDED}),
    "CP2 + distributed optimizer": ("qwen2", {"cp": 2, **SHARDED}),
    "DP2 × EP2 + distributed optimizer": ("qwen3_moe", {"dp": 2, "ep": 2, **SHARDED}),
    "LoRA, DP2 + distributed optimizer": (
        "qwen2",
        {"dp": 2, "lora": LoraConfig(rank=2, alpha=4.0), **SHARDED},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every layout with and without overlap; return the folder with the results."""
    folder: Path = tmp_path_factory.mktemp("overlap")
    for family in {family for family, _ in LAYOUTS.values()}:
        reference.make_model(family, folder / family)
    jobs = []
    for name, (family, layout) in LAYOUTS.items():
        sizes = {size: layout[size] for size in ("tp", "pp", "cp", "dp", "ep") if size in layout}
        for overlap in (False, True):
            spec = ranks.make_spec(str(folder / family), overlap=overlap, **layout)
            arguments = {
                "spec": spec,
                "out": folder / name / str(overlap),
                "samples": reference.make_samples(),
                "steps": STEPS,
                "max_tokens": 12,
            }
            (folder / name).mkdir(exist_ok=True)
            jobs.append(ranks.Job(function=ranks.train, arguments=arguments, **sizes))
    ranks.run_jobs(jobs)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_training_with_overlap_has_the_same_bits(folder: Path, name: str) -> None:
    plain = folder / name / "False"
    overlapped = folder / name / "True"
    histories = [json.loads((out / "history.json").read_text()) for out in (plain, overlapped)]
    assert histories[0] == histories[1]
    for step in range(STEPS):
        weights, others = (
            torch.load(out / f"weights_{step}.pt", weights_only=True) for out in (plain, overlapped)
        )
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[key], others[key]) for key in weights)
