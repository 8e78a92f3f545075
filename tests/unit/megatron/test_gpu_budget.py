"""What a step may cost on a GPU, by the meter: no GPU is asked, so a change that makes one wait fails here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
STATISTICS, NORMS = "/mcore_mas/megatron/device.py", "/core/optimizer/clip_grads.py"
SPEED = {  # estimated share of an H200's peak that an update has at least, and launches that it has at most
    "4b groups": ({"model": "4b", "layout": "groups", "recompute": True}, 0.305, 9_400),
    "4b turns": ({"model": "4b", "layout": "turns", "recompute": True}, 0.3, 9_350),
    "1.7b groups": ({"model": "1.7b", "layout": "groups"}, 0.435, 3_800),
    "1.7b branches": ({"model": "1.7b", "layout": "branches"}, 0.445, 3_850),
    "1.7b whole": ({"model": "1.7b", "layout": "whole"}, 0.42, 3_800),
    "0.5b groups": ({"model": "0.5b", "layout": "groups"}, 0.365, 3_000),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"bf16": False},
    "two ranks share tensors and sequences": {"tp": 2, "sp": True},
    "two ranks share a context": {"cp": 2},
    "two ranks share the optimizer, while exchanging": {"dp": 2, "distributed_optimizer": True, "overlap": True},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "a critic": {"head": "value"},
    "torch's attention": {"attention": "torch"},
}


@pytest.fixture(scope="module")
def metered() -> dict[str, dict[str, Any]]:
    """The figures of every case, from one process: the meter changes torch before Megatron is imported."""
    cases = {name: case for name, (case, *_) in SPEED.items()}
    cases |= {name: {"model": "tiny", "layout": "small", **way} for name, way in WAYS.items()}
    cases["two micro-batches"] = {"model": "tiny", "layout": "small", "microbatches": 2}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu", *map(json.dumps, cases.values())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, lines, strict=True))


@pytest.mark.parametrize("name", SPEED)
def test_an_update_keeps_to_its_launches_and_its_time(name: str, metered: dict[str, dict[str, Any]]) -> None:
    case, share, launches = SPEED[name]
    found = metered[name]
    assert found["mfu"] >= share, found["milliseconds"]
    assert found["launches"] <= launches
    assert found["launches_of_attention_per_layer"] == (4 if case.get("recompute") else 3)


@pytest.mark.parametrize("name", [*SPEED, *WAYS])
def test_the_host_waits_for_statistics_and_norms_alone(name: str, metered: dict[str, dict[str, Any]]) -> None:
    found = metered[name]
    waits = {place.rpartition(":")[0]: count for place, count in found["waits"].items()}
    # of one agent: its norm, the step's, and Megatron's own when it clips
    assert waits == {STATISTICS: 1, NORMS: 3}
    assert found["copies"] == {} and found["uploads"] == 1
    assert found["mixed"] == {}


def test_a_micro_batch_is_one_upload_and_no_wait(metered: dict[str, dict[str, Any]]) -> None:
    one, two = metered["plain"], metered["two micro-batches"]
    assert (two["uploads"], two["copies"], sum(two["waits"].values())) == (2, {}, sum(one["waits"].values()))
