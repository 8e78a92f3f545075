"""Cost of an update on a GPU, as metered without one: a change that makes it slower or larger fails here.

A prediction is also compared with what an H100 took.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from benchmarks.gpu.__main__ import RESULTS, read
from benchmarks.gpu.shapes import LAYOUTS, MODELS, line_of_case, write_model
from mcore_mas.config.policy import LoraConfig
from mcore_mas.planning.memory import TrainerSettings, estimate_trainer_memory
from rollout.models.architecture import read_architecture
from rollout.models.layout import ParallelLayout
from tests.support.gpu_meter import LINK_BANDWIDTH

# The meter runs updates of models of up to 30B parameters.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
MEASURED = read(RESULTS)  # result lines of an H100
Figures = dict[str, Any]  # output of the meter for a case

# Fraction by which an update may be slower, launch more kernels and need more memory than today.
MARGIN = 0.03

# Places where the host waits for the GPU, and how often, in an update of one agent: for its
# statistics, and for the norm of its gradient, which is that of the step.
HOST_WAITS = {"transfer.py download": 1, "clip_grads.py get_grad_norm_fp32": 1}

# Place where megatron-core 0.19 waits once, in the first update.
FIRST_UPDATE_WAIT = (
    "optimizer.py has_grad_norm_group"
    if Version(version("megatron-core")) >= Version("0.19")
    else None
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Figures of an update today; the figures without an attribute here must be empty.

    Attributes:
        case: of the meter.
        mfu: estimated share of an H100's peak.
        launches: number of kernels.
        gib: peak of the memory.
        moved_gb: bytes that kernels read and write, in GB.
        layer: launches in a layer: attention, projections, MLP, all others; None: not checked.
        waits: places where the host waits for the GPU.
        order: of uploads and computations; an upload comes before the computation of earlier ones.
    """

    case: dict[str, Any]
    mfu: float = 0.0
    launches: float = math.inf
    gib: float = math.inf
    moved_gb: float = math.inf
    layer: tuple[float, float, float, float] | None = None
    waits: dict[str, int] = field(default_factory=lambda: HOST_WAITS)
    order: list[str] = field(default_factory=lambda: ["upload", "compute"])

    def excess(self, figures: Figures) -> str:
        """Describe the figures that are worse than allowed, one in each line; "" if there are none."""
        lines = []
        if figures["mfu"] < self.mfu * (1 - MARGIN):
            milliseconds = figures["milliseconds"]
            lines.append(f"MFU {figures['mfu']}, today {self.mfu}; milliseconds {milliseconds}")
        if figures["launches"] > self.launches * (1 + MARGIN):
            by_region = figures["launches_by_region"]
            lines.append(f"launches {figures['launches']}, today {self.launches}: {by_region}")
        gib = figures["bytes"]["peak"] / 2**30
        if gib > self.gib * (1 + MARGIN):
            lines.append(f"GiB at the peak {gib:.2f}, today {self.gib}")
        if figures["moved_gb"] > self.moved_gb * (1 + MARGIN):
            lines.append(f"GB moved {figures['moved_gb']}, today {self.moved_gb}")
        regions = figures["launches_per_layer"].items()
        for (region, count), max_count in zip(regions, self.layer or (), strict=False):
            if count > max_count:
                lines.append(f"launches of a layer in {region} {count}, today {max_count}")

        expected = {
            "waits": self.waits,
            "copies": {},
            "inline": {},
            "order": self.order,
            "races": {},
            "mixed": {},
        }
        for name, expected_value in expected.items():
            value = figures[name]
            if FIRST_UPDATE_WAIT and name in ("waits", "copies"):
                value = {
                    source_line: count
                    for source_line, count in value.items()
                    if not source_line.startswith(FIRST_UPDATE_WAIT)
                }
            if value != expected_value:
                lines.append(f"{name} {value}, today {expected_value}")
        return "\n".join(lines)


# Launches in a layer without recomputation, with selective and with full recomputation.
DENSE = (3, 11, 8, 8.2)
SELECTIVE = (3, 12, 10, 8.2)
FULL = (4, 14, 10, 13)

UPDATE_BUDGETS = {
    "4b groups": Budget(
        case={"model": "4b", "layout": "groups", "recompute": "selective"},
        mfu=0.527,
        launches=2600,
        gib=113.2,
        moved_gb=763.8,
        layer=SELECTIVE,
    ),
    "4b groups, full": Budget(
        case={"model": "4b", "layout": "groups", "recompute": "full"},
        mfu=0.438,
        launches=2887,
        gib=72.6,
        moved_gb=863.1,
        layer=FULL,
    ),
    "1.7b groups": Budget(
        case={"model": "1.7b", "layout": "groups"},
        mfu=0.513,
        launches=1922,
        gib=61.3,
        moved_gb=385.3,
        layer=DENSE,
    ),
    "1.7b branches": Budget(
        case={"model": "1.7b", "layout": "branches"},
        mfu=0.527,
        launches=2624,
        gib=89.6,
        moved_gb=659.6,
        layer=DENSE,
    ),
    "0.5b groups": Budget(
        case={"model": "0.5b", "layout": "groups"},
        mfu=0.376,
        launches=1622,
        gib=25.5,
        moved_gb=188.8,
        layer=(3, 10, 8, 8.3),
    ),
    # Two of 48 layers, in one micro-batch. The optimizer takes much of the update, because it steps
    # the weights of all experts.
    "30b-a3b groups": Budget(
        case={"model": "30b-a3b", "layout": "groups", "recompute": "selective"},
        mfu=0.357,
        launches=1241,
        gib=36.0,
        moved_gb=215.8,
        layer=(3, 12, 48, 10.5),
    ),
    # Each layer waits once for the numbers of rows that ranks exchange, and the norm of experts'
    # gradients is computed separately.
    "30b-a3b groups, experts on two ranks": Budget(
        case={"model": "30b-a3b", "layout": "groups", "recompute": "selective", "ep": 2, "dp": 2},
        mfu=0.364,
        launches=1245,
        gib=26.2,
        moved_gb=201.9,
        layer=(3, 12, 59, 10.5),
        waits=HOST_WAITS
        | {
            "token_dispatcher.py _maybe_dtoh_and_synchronize": 2,
            "clip_grads.py get_grad_norm_fp32": 2,
        },
    ),
}

# The second update is metered, in which Adam has its moments from the start. All layers are alike, so
# half of them are enough, and a quarter for sums over agents and swaps of the reference's weights.
MEMORY_CASE = {"model": "0.5b", "layers": 12, "layout": "groups", "updates": 2}
FEW_LAYERS = {"layers": 6}

# Settings of an update of 16384 tokens, and the smallest share of the planned peak that the meter may
# count. A plan is an upper bound, which is least tight with full recomputation. It adds the logits and
# the gradient of the output layer, of which only one is there at a time.
MEMORY_CASES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 0.97),
    "recomputed": ({"recompute": "full", "layers": 24}, 0.9),
    "norms and SwiGLU recomputed": ({"recompute": "selective"}, 0.97),
    "two ranks share tensors and sequences": ({"tp": 2, "sp": True, "layers": 24}, 0.97),
    "two ranks share a context": ({"cp": 2}, 0.97),
    "two ranks share the optimizer": ({"dp": 2, "distributed_optimizer": True}, 0.97),
    "adapters": ({"lora": {"rank": 4, "alpha": 8.0}}, 0.97),
    "a critic": ({"head": "value"}, 0.97),
    "norms of queries and keys": ({"model": "1.7b"}, 0.97),
    "a mixture": ({"model": "30b-a3b", "layers": 2}, 0.96),
    "three agents": ({"agents": 3, **FEW_LAYERS}, 0.96),
    "three agents, two ranks share the optimizer": (
        {"agents": 3, "dp": 2, "distributed_optimizer": True, **FEW_LAYERS},
        0.96,
    ),
}

# Fields of the trainer's specification, with which the host waits as rarely as without.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"bf16": False},
    "two ranks share tensors and sequences": {"tp": 2, "sp": True},
    "two ranks share a context": {"cp": 2},
    "two ranks share the optimizer, while exchanging": {
        "dp": 2,
        "distributed_optimizer": True,
        "overlap": True,
    },
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "adapters, recomputed": {"lora": {"rank": 4, "alpha": 8.0}, "recompute": "selective"},
    "a critic": {"head": "value"},
    "torch's attention": {"attention": "torch"},
}
HOST_MOMENTS_CASE = {"model": "0.5b", "layout": "groups", "updates": 2, "host_moments": True}
REFERENCE_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two ranks share the optimizer": {"dp": 2, "distributed_optimizer": True},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
}
SMALL_UPDATE = Budget(
    case={"model": "tiny", "layout": "small", "microbatches": 3},
    launches=817,
    layer=(3, 11, 8, 10.5),
    order=["upload", "upload", "compute", "upload", "compute", "compute"],
)

# Changes that slow a GPU down (`CHANGES` of the meter), and the part of `SMALL_UPDATE`'s message about each.
SLOWING_CHANGES = {
    "queries and keys not fused": "launches of a layer in projections 54.0, today 11",
    "SwiGLU and head not fused": "launches of a layer in mlp 11.0, today 8",
    "pageable": "copies {'transfer.py upload, pageable': 3}",
    "waiting in each step": "waits {'schedules.py forward_step': 3",
    "a stream's wait in each step": "waits {'schedules.py forward_step': 3",
    "not ahead": "order ['upload', 'compute', 'upload', 'compute', 'upload', 'compute'], today ['upload', 'upload'",
    "residuals not fused": "launches of a layer in layer 12.0, today 10.5",
    "norm of the gradient computed twice": "'clip_grads.py get_grad_norm_fp32': 2",
    "read too early": "races {'layers.py forward reads what another stream may not have written': 3",
    "freed too early": "races {'memory is reused while another stream may read it (no record_stream)': 2}",
}
COPIES_CASE = UPDATE_BUDGETS["1.7b groups"].case | {
    "updates": 2,
    "change": "weights copied one by one",
}
# Two of the updates that an H100 was measured with: two models, two layouts
MEASURED_CASES: list[dict[str, Any]] = [
    {"model": "4b", "layout": "groups", "recompute": "full"},
    {"model": "1.7b", "layout": "turns"},
]
# Cases whose operations must be exactly those of the model.
OPERATION_CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": "tiny", "layout": "small"},
    "a critic": {"model": "tiny", "layout": "small", "head": "value"},
    "adapters": {"model": "tiny", "layout": "small", "lora": {"rank": 4, "alpha": 8.0}},
    "1.7b branches": UPDATE_BUDGETS["1.7b branches"].case | {"updates": 2},
    "1.7b branches, logits twice": UPDATE_BUDGETS["1.7b branches"].case
    | {"change": "logits computed twice"},
    "a mixture": UPDATE_BUDGETS["30b-a3b groups"].case | {"updates": 2},
}


def run_meter(cases: list[str]) -> list[Figures]:
    """Meter cases, given as JSON, in a process of their own: the meter changes torch before Megatron is imported."""
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu", *cases],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def metered() -> dict[str, Figures]:
    """Return the figures of all cases, by name; equal cases are metered once."""
    cases: dict[str, dict[str, Any]] = {"host moments": HOST_MOMENTS_CASE}
    for name, budget in UPDATE_BUDGETS.items():
        cases[f"budget, {name}"] = budget.case | {"updates": 2}
    for name, settings in SETTINGS.items():
        cases[f"settings, {name}"] = {"model": "tiny", "layout": "small", **settings}
    for name, (settings, _) in MEMORY_CASES.items():
        cases[f"memory, {name}"] = MEMORY_CASE | settings
    for name in ("", *SLOWING_CHANGES):
        cases[f"change, {name}"] = SMALL_UPDATE.case | {"change": name}
    cases["copies one by one"] = COPIES_CASE
    for case in MEASURED_CASES:
        name = f"measured, {case['model']} {case['layout']}"
        cases[name] = case | {"updates": 2, "change": "as measured"}
    for name, case in OPERATION_CASES.items():
        cases[f"operations, {name}"] = case
    for name, settings in REFERENCE_SETTINGS.items():
        scoring = {"updates": 1, "reference": True}
        cases[f"reference, {name}"] = MEMORY_CASE | FEW_LAYERS | scoring | settings

    encoded = {name: json.dumps(case, sort_keys=True) for name, case in cases.items()}
    distinct = list(dict.fromkeys(encoded.values()))
    figures = dict(zip(distinct, run_meter(distinct), strict=True))
    return {name: figures[case] for name, case in encoded.items()}


@pytest.mark.parametrize("name", UPDATE_BUDGETS)
def test_an_update_keeps_to_its_budget(name: str, metered: dict[str, Figures]) -> None:
    excess = UPDATE_BUDGETS[name].excess(metered[f"budget, {name}"])
    assert not excess, excess


@pytest.mark.parametrize("name", SETTINGS)
def test_the_host_waits_for_statistics_and_norms_only(
    name: str, metered: dict[str, Figures]
) -> None:
    excess = Budget(case={}).excess(metered[f"settings, {name}"])
    assert not excess, excess


@pytest.mark.parametrize("name", SLOWING_CHANGES)
def test_a_change_that_slows_a_gpu_down_exceeds_the_budget(
    name: str, metered: dict[str, Figures]
) -> None:
    assert not SMALL_UPDATE.excess(metered["change, "])
    assert SLOWING_CHANGES[name] in SMALL_UPDATE.excess(metered[f"change, {name}"])


def test_weights_that_are_copied_one_by_one_exceed_the_budget(metered: dict[str, Figures]) -> None:
    excess = UPDATE_BUDGETS["1.7b groups"].excess(metered["copies one by one"])
    assert "launches 2" in excess
    assert "'optimizer': 3" in excess


@pytest.mark.parametrize(
    "case", MEASURED_CASES, ids=lambda case: f"{case['model']} {case['layout']}"
)
def test_a_predicted_time_is_within_ten_percent_of_the_measured_one(
    case: dict[str, Any], metered: dict[str, Figures]
) -> None:
    measured = line_of_case(MEASURED, "updates", case)
    assert measured is not None
    predicted = metered[f"measured, {case['model']} {case['layout']}"]
    assert predicted["seconds_per_update"] == pytest.approx(measured["seconds_per_update"], rel=0.1)


@pytest.mark.parametrize("name", OPERATION_CASES)
def test_operations_are_those_of_the_model(name: str, metered: dict[str, Figures]) -> None:
    """Compare the operations of products, and of pairs in the tiles' plan, with those of the model."""
    figures = metered[f"operations, {name}"]
    case = OPERATION_CASES[name]
    model = MODELS[case["model"]]
    hidden = model["hidden_size"]
    known_difference = 0
    if "lora" in case:
        # The embedding is frozen, so the first layer's queries, keys and values need no gradient of
        # their input.
        heads = model["num_attention_heads"] + 2 * model["num_key_value_heads"]
        outputs = model["head_dim"] * heads + 3 * case["lora"]["rank"]
        known_difference = -2 * figures["tokens"] * hidden * outputs
    elif case.get("change") == "logits computed twice":
        # Except for those of the last chunk
        rows = sum(trained for *_, trained in LAYOUTS[case["layout"]])
        chunk_rows = (1 << 30) // (4 * model["vocab_size"])
        repeated_rows = (rows - 1) // chunk_rows * chunk_rows
        known_difference = 2 * hidden * model["vocab_size"] * repeated_rows
    operations = figures["operations"]
    assert operations["counted"] - operations["model"] == known_difference


@pytest.mark.parametrize(
    "name", [name for name, (settings, _) in MEMORY_CASES.items() if "agents" in settings]
)
def test_the_sum_of_agents_gradients_is_in_host_memory(
    name: str, metered: dict[str, Figures]
) -> None:
    """For every agent but one, float32 gradients cross to the host and back; the host does not wait.

    With a distributed optimizer they stay on the GPU, because a rank has only a part of them.
    """
    figures = metered[f"memory, {name}"]
    settings, _ = MEMORY_CASES[name]
    agents = settings["agents"]
    # There is also the norm of the whole gradient.
    assert figures["waits"] == {
        "transfer.py download": agents,
        "clip_grads.py get_grad_norm_fp32": agents + 1,
    }
    assert figures["copies"] == {}
    assert figures["mixed"] == {}
    gradient_bytes = 0 if "dp" in settings else (agents - 1) * 4 * figures["trained"]
    for direction in ("up", "down"):
        # A micro-batch and its statistics have 1.2 MB each.
        crossed = figures["crossed"][direction]
        assert crossed == pytest.approx(gradient_bytes, abs=2e6 * agents)


def test_moments_cross_in_both_directions_at_once(metered: dict[str, Figures]) -> None:
    """The host waits once for them. Those of the embedding, a quarter of all, arrive alone."""
    figures = metered["host moments"]
    assert figures["waits"] == HOST_WAITS | {"host_moments.py step_by_weight": 1}
    assert figures["copies"] == {}
    moment_bytes = 2 * 4 * figures["trained"]
    assert figures["races"] == {}
    crossed = figures["crossed"]
    one_after_the_other_s = (crossed["up"] + crossed["down"]) / LINK_BANDWIDTH
    assert figures["idle_ms"] < 0.85 * 1e3 * one_after_the_other_s
    assert moment_bytes < crossed["down"] < crossed["up"] < 1.01 * moment_bytes


@pytest.mark.parametrize("name", REFERENCE_SETTINGS)
def test_the_reference_is_swapped_and_the_host_waits_for_its_scores_only(
    name: str, metered: dict[str, Figures]
) -> None:
    figures = metered[f"reference, {name}"]
    assert list(figures["waits"].values()) == [1]
    assert figures["copies"] == {}
    assert figures["mixed"] == {}
    # Weights in bfloat16 are swapped before and after. Adapters are switched off instead.
    has_adapters = "lora" in REFERENCE_SETTINGS[name]
    swapped_bytes = 0 if has_adapters else 2 * 2 * figures["trained"]
    for direction in ("up", "down"):
        # A micro-batch and its scores have 1.2 MB.
        assert figures["crossed"][direction] == pytest.approx(swapped_bytes, abs=2e6)


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_a_plan_has_enough_memory(name: str, metered: dict[str, Figures], tmp_path: Path) -> None:
    """Weights, gradients and optimizer are planned to 1 %, and the peak is an upper bound."""
    figures = metered[f"memory, {name}"]
    settings, min_share = MEMORY_CASES[name]
    case = MEMORY_CASE | settings
    layout = ParallelLayout(**{key: case[key] for key in ("tp", "cp", "dp", "sp") if key in case})
    trainer_settings = TrainerSettings(
        bf16=True,
        distributed_optimizer=case.get("distributed_optimizer", False),
        recompute=case.get("recompute", "none"),
        microbatch_tokens=figures["tokens"],
        lora=LoraConfig(**case["lora"]) if "lora" in case else None,
        value_head="head" in case,
        agents=case.get("agents", 1),
    )
    architecture = read_architecture(write_model(case["model"], tmp_path, case.get("layers")))
    planned = estimate_trainer_memory(architecture, layout, trainer_settings)
    assert figures["bytes"]["kept"] == pytest.approx(planned.persistent, rel=0.01)
    assert min_share <= figures["bytes"]["peak"] / planned.peak <= 1.0
