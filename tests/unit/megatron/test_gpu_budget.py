"""What a step may cost on a GPU, by the meter: no GPU is asked, so a change that makes one wait fails here."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from benchmarks.gpu.shapes import write_model
from mcore_mas.config.policy import LoraConfig
from mcore_mas.planning.memory import TrainerKind, trainer_memory
from mcore_mas.rollout.models.architecture import read_architecture
from mcore_mas.rollout.models.layout import ParallelLayout

ROOT = Path(__file__).resolve().parents[3]
STATISTICS, NORMS = "/mcore_mas/megatron/device.py", "/core/optimizer/clip_grads.py"
# megatron-core 0.19 asks once, in the first update, whether any rank has norms of a group of their own
FIRST = {"/core/optimizer/optimizer.py": 1} if Version(version("megatron-core")) >= Version("0.19") else {}
SPEED = {  # estimated share of an H200's peak that an update has at least, and launches that it has at most
    "4b groups": ({"model": "4b", "layout": "groups", "recompute": "selective"}, 0.43, 4_000),
    "4b turns": ({"model": "4b", "layout": "turns", "recompute": "selective"}, 0.35, 4_000),
    "4b groups, full": ({"model": "4b", "layout": "groups", "recompute": "full"}, 0.4, 3_700),
    "1.7b groups": ({"model": "1.7b", "layout": "groups"}, 0.435, 3_800),
    "1.7b branches": ({"model": "1.7b", "layout": "branches"}, 0.445, 3_850),
    "1.7b whole": ({"model": "1.7b", "layout": "whole"}, 0.42, 3_800),
    "0.5b groups": ({"model": "0.5b", "layout": "groups"}, 0.365, 3_000),
    # two of 48 layers, whose experts weigh most on the optimizer; of one micro-batch
    "30b-a3b groups": ({"model": "30b-a3b", "layout": "groups", "recompute": "selective"}, 0.345, 500),
}
MEMORY = {"model": "0.5b", "layout": "groups", "updates": 2}  # the second, which has Adam's moments from the start
# Way of an update of 16384 tokens, and the least share of the planned peak that the meter may count; a plan is an upper
# figure, and furthest above where layers are computed again
HELD: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0.97),
    "recomputed": ({"recompute": "full"}, 0.9),
    "norms and SwiGLU recomputed": ({"recompute": "selective"}, 0.97),
    "two ranks share tensors and sequences": ({"tp": 2, "sp": True}, 0.97),
    "two ranks share a context": ({"cp": 2}, 0.97),
    "two ranks share the optimizer": ({"dp": 2, "distributed_optimizer": True}, 0.97),
    "adapters": ({"lora": {"rank": 4, "alpha": 8.0}}, 0.97),
    "a critic": ({"head": "value"}, 0.97),
    "norms of queries and keys": ({"model": "1.7b"}, 0.97),
    "a mixture": ({"model": "30b-a3b"}, 0.97),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"bf16": False},
    "two ranks share tensors and sequences": {"tp": 2, "sp": True},
    "two ranks share a context": {"cp": 2},
    "two ranks share the optimizer, while exchanging": {"dp": 2, "distributed_optimizer": True, "overlap": True},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "adapters, recomputed": {"lora": {"rank": 4, "alpha": 8.0}, "recompute": "selective"},
    "a critic": {"head": "value"},
    "torch's attention": {"attention": "torch"},
}


@pytest.fixture(scope="module")
def metered() -> dict[str, dict[str, Any]]:
    """The figures of every case, from one process: the meter changes torch before Megatron is imported."""
    cases = {name: case | {"updates": 2} for name, (case, *_) in SPEED.items()}
    cases |= {name: {"model": "tiny", "layout": "small", **way} for name, way in WAYS.items()}
    cases |= {f"held, {name}": MEMORY | case for name, (case, _) in HELD.items()}
    cases["two micro-batches"] = {"model": "tiny", "layout": "small", "microbatches": 2}
    told = {name: json.dumps(case, sort_keys=True) for name, case in cases.items()}
    distinct = list(dict.fromkeys(told.values()))  # two tests may look at the same update
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu", *distinct]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = dict(zip(distinct, lines, strict=True))
    return {name: found[case] for name, case in told.items()}


@pytest.mark.parametrize("name", SPEED)
def test_an_update_keeps_to_its_launches_and_its_time(name: str, metered: dict[str, dict[str, Any]]) -> None:
    case, share, launches = SPEED[name]
    found = metered[name]
    assert found["mfu"] >= share, found["milliseconds"]
    assert found["launches"] <= launches
    assert found["launches_of_attention_per_layer"] == (4 if case.get("recompute") == "full" else 3)


@pytest.mark.parametrize("name", [*SPEED, *WAYS])
def test_the_host_waits_for_statistics_and_norms_alone(name: str, metered: dict[str, dict[str, Any]]) -> None:
    found = metered[name]
    waits = {place.rpartition(":")[0]: count for place, count in found["waits"].items()}
    # of one agent: its norm, which is the step's, and Megatron's own when it clips
    assert {**waits, **FIRST} == {STATISTICS: 1, NORMS: 2, **FIRST}
    assert found["copies"] == {} and found["uploads"] == 1
    assert found["mixed"] == {}


def test_a_micro_batch_is_one_upload_and_no_wait(metered: dict[str, dict[str, Any]]) -> None:
    one, two = metered["plain"], metered["two micro-batches"]
    assert (two["uploads"], two["copies"], sum(two["waits"].values())) == (2, {}, sum(one["waits"].values()))


@pytest.mark.parametrize("name", HELD)
def test_a_plan_has_room_for_what_a_gpu_holds(name: str, metered: dict[str, Any], tmp_path: Path) -> None:
    """Weights, gradients and optimizer to 1 %; the peak of an update no more than planned, nor much less."""
    case, share = HELD[name]
    found, case = metered[f"held, {name}"], MEMORY | case
    layout = ParallelLayout(**{key: case[key] for key in ("tp", "cp", "dp", "sp") if key in case})
    settings = {"distributed_optimizer": case.get("distributed_optimizer", False)}
    kind = TrainerKind(
        bf16=True,
        recompute=case.get("recompute", "none"),
        tokens=found["tokens"],
        lora=LoraConfig(**case["lora"]) if "lora" in case else None,
        value_head="head" in case,
        **settings,
    )
    planned = trainer_memory(read_architecture(write_model(case["model"], tmp_path)), layout, kind)
    assert found["bytes"]["kept"] == pytest.approx(planned.kept, rel=0.01)
    assert share <= found["bytes"]["peak"] / planned.total <= 1.0
