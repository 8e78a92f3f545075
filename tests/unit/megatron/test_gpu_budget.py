"""What a step may cost on a GPU, by the meter: no GPU is asked, so a change that makes one wait fails here."""

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

from benchmarks.gpu.shapes import LAYOUTS, MODELS, write_model
from mcore_mas.config.policy import LoraConfig
from mcore_mas.planning.memory import TrainerSettings, estimate_trainer_memory
from rollout.models.architecture import read_architecture
from rollout.models.layout import ParallelLayout

pytestmark = pytest.mark.slow  # the meter plays updates of models of up to 30B parameters
ROOT = Path(__file__).resolve().parents[3]
MARGIN = 0.03  # by which an update may be slower, launch more and hold more than it does today
# of one agent: its statistics, its norm, which is the step's, and Megatron's own norm when it clips
WAITS = {"transfer.py download": 1, "clip_grads.py get_grad_norm_fp32": 2}
# megatron-core 0.19 asks once, in the first update, whether any rank has norms of a group of their own
FIRST = (
    "optimizer.py has_grad_norm_group"
    if Version(version("megatron-core")) >= Version("0.19")
    else None
)
SENT = ["upload", "compute"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the meter says of an update today; what must not change at all is the same for all of them."""

    case: dict[str, Any]
    mfu: float = 0.0  # estimated share of an H200's peak
    launches: float = math.inf
    gib: float = math.inf  # at the peak
    layer: tuple[int, int, int, int] | None = (
        None  # launches in a layer: attention, projections, MLP, all else
    )
    waits: dict[str, int] = field(default_factory=lambda: WAITS)
    order: list[str] = field(
        default_factory=lambda: SENT
    )  # each upload before what was sent earlier is computed with

    def exceeded(self, found: dict[str, Any]) -> str:
        """A line for each figure that is worse than it may be."""
        told, more = [], 1 + MARGIN
        if found["mfu"] < self.mfu * (1 - MARGIN):
            told.append(
                f"MFU {found['mfu']}, today {self.mfu}; milliseconds {found['milliseconds']}"
            )
        if found["launches"] > self.launches * more:
            told.append(
                f"launches {found['launches']}, today {self.launches}: {found['launches_by_region']}"
            )
        if (gib := found["bytes"]["peak"] / 2**30) > self.gib * more:
            told.append(f"GiB at the peak {gib:.2f}, today {self.gib}")
        for (region, count), most in zip(
            found["launches_per_layer"].items(), self.layer or (), strict=False
        ):
            if count > most:
                told.append(f"launches of a layer in {region} {count}, today {most}")
        exact = {
            "waits": self.waits,
            "copies": {},
            "inline": {},
            "order": self.order,
            "races": {},
            "mixed": {},
        }
        for name, value in exact.items():
            seen = found[name]
            if FIRST and name in ("waits", "copies"):
                seen = {
                    place: count for place, count in seen.items() if not place.startswith(FIRST)
                }
            if seen != value:
                told.append(f"{name} {seen}, today {value}")
        return "\n".join(told)


DENSE, SELECTIVE, FULL = (
    (3, 20, 8, 12),
    (3, 26, 17, 6),
    (4, 27, 11, 16),
)  # by what is computed again
SPEED = {
    "4b groups": Budget(
        case={"model": "4b", "layout": "groups", "recompute": "selective"},
        mfu=0.519,
        launches=2383,
        gib=117.7,
        layer=SELECTIVE,
    ),
    "4b turns": Budget(
        case={"model": "4b", "layout": "turns", "recompute": "selective"},
        mfu=0.519,
        launches=2338,
        gib=115.2,
        layer=SELECTIVE,
    ),
    "4b groups, full": Budget(
        case={"model": "4b", "layout": "groups", "recompute": "full"},
        mfu=0.425,
        launches=2599,
        gib=72.7,
        layer=FULL,
    ),
    "4b long, full": Budget(
        case={"model": "4b", "layout": "long", "recompute": "full"},
        mfu=0.374,
        launches=2680,
        gib=77.7,
        layer=FULL,
    ),
    "1.7b groups": Budget(
        case={"model": "1.7b", "layout": "groups"}, mfu=0.517, launches=1651, gib=63.1, layer=DENSE
    ),
    "1.7b branches": Budget(
        case={"model": "1.7b", "layout": "branches"},
        mfu=0.522,
        launches=1732,
        gib=93.1,
        layer=DENSE,
    ),
    "1.7b whole": Budget(
        case={"model": "1.7b", "layout": "whole"}, mfu=0.487, launches=1660, gib=95.7, layer=DENSE
    ),
    "0.5b groups": Budget(
        case={"model": "0.5b", "layout": "groups"},
        mfu=0.451,
        launches=1303,
        gib=25.6,
        layer=(3, 14, 8, 12),
    ),
    # two of 48 layers, whose experts weigh most on the optimizer; of one micro-batch
    "30b-a3b groups": Budget(
        case={"model": "30b-a3b", "layout": "groups", "recompute": "selective"},
        mfu=0.369,
        launches=427,
        gib=36.3,
        layer=(3, 26, 55, 6),
    ),
    # each layer waits once for how many rows go from rank to rank; and experts' gradients have a norm of their own
    "30b-a3b groups, experts on two ranks": Budget(
        case={"model": "30b-a3b", "layout": "groups", "recompute": "selective", "ep": 2, "dp": 2},
        mfu=0.376,
        launches=466,
        gib=26.4,
        layer=(3, 26, 66, 6),
        waits=WAITS
        | {
            "token_dispatcher.py _maybe_dtoh_and_synchronize": 2,
            "clip_grads.py get_grad_norm_fp32": 4,
        },
    ),
}
MEMORY = {
    "model": "0.5b",
    "layout": "groups",
    "updates": 2,
}  # the second, which has Adam's moments from the start
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
    "two agents": ({"agents": 2}, 0.97),
    "three agents": ({"agents": 3}, 0.97),
    "three agents, two ranks share the optimizer": (
        {"agents": 3, "dp": 2, "distributed_optimizer": True},
        0.97,
    ),
}
WAYS: dict[str, dict[str, Any]] = {
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
HOST_MOMENTS = {"model": "tiny", "layout": "small", "updates": 2, "host_moments": True}
REFERENCE: dict[str, dict[str, Any]] = {
    "plain": {},
    "two ranks share the optimizer": {"dp": 2, "distributed_optimizer": True},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
}


SMALL = Budget(
    case={"model": "tiny", "layout": "small", "microbatches": 3},
    launches=740,
    layer=DENSE,
    order=["upload", "upload", "compute", "upload", "compute", "compute"],
)
# Changes for the worse (`CHANGES` of the meter), and what the budget of the small update says of each
WORSE = {
    "rotation not fused": "launches of a layer in projections 54.0, today 20",
    "SwiGLU and head not fused": "launches of a layer in mlp 11.0, today 8",
    "pageable": "copies {'transfer.py upload, pageable': 3}",
    "waiting in each step": "waits {'schedules.py forward_step': 3",
    "a stream's wait in each step": "waits {'schedules.py forward_step': 3",
    "not ahead": "order ['upload', 'compute', 'upload', 'compute', 'upload', 'compute'], today ['upload', 'upload'",
    "read too early": "races {'layers.py forward reads what another stream may not have written': 3",
    "freed too early": "races {'memory is reused while another stream may read it (no record_stream)': 2}",
}
# Figures whose operations are the model's to the last one
COUNTED: dict[str, dict[str, Any]] = {
    "plain": {"model": "tiny", "layout": "small"},
    "a critic": {"model": "tiny", "layout": "small", "head": "value"},
    "adapters": {"model": "tiny", "layout": "small", "lora": {"rank": 4, "alpha": 8.0}},
    "1.7b branches": SPEED["1.7b branches"].case | {"updates": 2},
    "a mixture": SPEED["30b-a3b groups"].case | {"updates": 2},
}


@pytest.fixture(scope="module")
def metered() -> dict[str, dict[str, Any]]:
    """The figures of every case, from one process: the meter changes torch before Megatron is imported."""
    cases = {name: budget.case | {"updates": 2} for name, budget in SPEED.items()}
    cases |= {name: {"model": "tiny", "layout": "small", **way} for name, way in WAYS.items()}
    cases |= {f"held, {name}": MEMORY | case for name, (case, _) in HELD.items()}
    cases |= {f"worse, {name}": SMALL.case | {"change": name} for name in ("", *WORSE)}
    cases |= {f"counted, {name}": case for name, case in COUNTED.items()}
    cases |= {
        f"reference, {name}": {**MEMORY, "updates": 1, "reference": True, **way}
        for name, way in REFERENCE.items()
    }
    cases["moments"] = HOST_MOMENTS
    told = {name: json.dumps(case, sort_keys=True) for name, case in cases.items()}
    distinct = list(dict.fromkeys(told.values()))  # two tests may look at the same update
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_gpu", *distinct]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = dict(zip(distinct, lines, strict=True))
    return {name: found[case] for name, case in told.items()}


@pytest.mark.parametrize("name", SPEED)
def test_an_update_keeps_to_its_budget(name: str, metered: dict[str, dict[str, Any]]) -> None:
    assert not (told := SPEED[name].exceeded(metered[name])), told


@pytest.mark.parametrize("name", WAYS)
def test_the_host_waits_for_statistics_and_norms_alone(
    name: str, metered: dict[str, dict[str, Any]]
) -> None:
    assert not (told := Budget(case={}).exceeded(metered[name])), told


@pytest.mark.parametrize("name", WORSE)
def test_what_would_slow_a_gpu_down_is_over_the_budget(
    name: str, metered: dict[str, dict[str, Any]]
) -> None:
    assert not SMALL.exceeded(metered["worse, "])
    assert WORSE[name] in SMALL.exceeded(metered[f"worse, {name}"])


@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_a_gpu_is_given(name: str, metered: dict[str, Any]) -> None:
    """Products one by one, and pairs from the tiles' plan, are what the model has, but for a few that are known."""
    found = metered[f"counted, {name}"]
    case, sizes = COUNTED[name], MODELS[COUNTED[name]["model"]]
    apart = 0
    if (
        "lora" in case
    ):  # the embedding is frozen: nobody asks the first layer's queries, keys and values for its slope
        rows = sizes["head_dim"] * (sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"])
        apart = -2 * found["tokens"] * sizes["hidden_size"] * (rows + 3 * case["lora"]["rank"])
    elif (
        "head" not in case
    ):  # the head makes its logits a second time, but for the last chunk of them
        rows, chunk = (
            sum(n for *_, n in LAYOUTS[case["layout"]]),
            (1 << 30) // (4 * sizes["vocab_size"]),
        )
        apart = 2 * sizes["hidden_size"] * sizes["vocab_size"] * ((rows - 1) // chunk * chunk)
    assert found["operations"]["counted"] - found["operations"]["model"] == apart


@pytest.mark.parametrize("name", [name for name, (case, _) in HELD.items() if "agents" in case])
def test_what_other_agents_gradients_add_up_to_is_on_the_host(
    name: str, metered: dict[str, dict[str, Any]]
) -> None:
    """Float32 of all that a rank steps goes there and comes back for every agent but one; the host does not wait.

    What it shares out stays: a part of the gradient.
    """
    found, (case, _) = metered[f"held, {name}"], HELD[name]
    agents = case["agents"]
    # the whole norm, and Megatron's own when it clips
    assert found["waits"] == {
        "transfer.py download": agents,
        "clip_grads.py get_grad_norm_fp32": agents + 2,
    }
    assert found["copies"] == {} and found["mixed"] == {}
    moved = (agents - 1) * 4 * found["trained"] if "dp" not in case else 0
    for way in ("up", "down"):  # a micro-batch and its statistics are 1.2 MB each
        assert found["crossed"][way] == pytest.approx(moved, abs=2e6 * agents)


def test_the_host_waits_for_no_moment(metered: dict[str, dict[str, Any]]) -> None:
    found = metered["moments"]
    # once, for all that goes back
    assert (
        found["waits"] == WAITS | {"host_moments.py _step_by_weight": 1} and found["copies"] == {}
    )
    moments = 2 * 4 * found["trained"]
    assert moments < found["crossed"]["down"] < found["crossed"]["up"] < 1.01 * moments + 2e4


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_changes_places_with_the_weights_and_the_host_waits_for_its_scores_alone(
    name: str, metered: dict[str, dict[str, Any]]
) -> None:
    found = metered[f"reference, {name}"]
    assert list(found["waits"].values()) == [1] and found["copies"] == {} and found["mixed"] == {}
    moved = (
        0 if "lora" in REFERENCE[name] else 2 * 2 * found["trained"]
    )  # bfloat16, before and after
    for way in ("up", "down"):  # a micro-batch and its scores are 1.2 MB
        assert found["crossed"][way] == pytest.approx(moved, abs=2e6)


@pytest.mark.parametrize("name", HELD)
def test_a_plan_has_room_for_what_a_gpu_holds(
    name: str, metered: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, gradients and optimizer to 1 %; the peak of an update no more than planned, nor much less."""
    case, share = HELD[name]
    found, case = metered[f"held, {name}"], MEMORY | case
    layout = ParallelLayout(**{key: case[key] for key in ("tp", "cp", "dp", "sp") if key in case})
    settings = TrainerSettings(
        bf16=True,
        distributed_optimizer=case.get("distributed_optimizer", False),
        recompute=case.get("recompute", "none"),
        microbatch_tokens=found["tokens"],
        lora=LoraConfig(**case["lora"]) if "lora" in case else None,
        value_head="head" in case,
        agents=case.get("agents", 1),
    )
    architecture = read_architecture(write_model(case["model"], tmp_path))
    planned = estimate_trainer_memory(architecture, layout, settings)
    assert found["bytes"]["kept"] == pytest.approx(planned.persistent, rel=0.01)
    assert share <= found["bytes"]["peak"] / planned.peak <= 1.0
