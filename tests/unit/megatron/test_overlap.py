"""Exchanges of data-parallel ranks that overlap with computation change no bit of a training.

With the distributed optimizer and all weights trained, each rank steps a part of every bucket, and the
norm of the gradient is a sum in another order. These layouts are rows of docs/exactness.md.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_mas.config.policy import LoraConfig
from tests.support import ranks, reference

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"dp": 2},
    "LoRA, DP2 + distributed optimizer": {
        "dp": 2,
        "lora": LoraConfig(rank=2, alpha=4.0),
        "distributed_optimizer": True,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every layout with and without overlap; return the folder with the results."""
    folder: Path = tmp_path_factory.mktemp("overlap")
    reference.make_model("qwen2", folder / "qwen2")
    jobs = []
    for name, layout in LAYOUTS.items():
        for overlap in (False, True):
            # Buckets of this size hold a few parameters each.
            spec = ranks.make_spec(str(folder / "qwen2"), overlap=overlap, bucket=5_000, **layout)
            arguments = {
                "spec": spec,
                "out": folder / name / str(overlap),
                "samples": reference.make_samples(),
                "steps": STEPS,
                "max_tokens": 12,
            }
            (folder / name).mkdir(exist_ok=True)
            jobs.append(ranks.Job(function=ranks.train, arguments=arguments, dp=2))
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
