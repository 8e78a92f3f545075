"""Layers of Transformer Engine, compared with plain torch and with this package's own layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_mas.equations.agreement import GAP_BOUNDS, describe_disagreement
from mcore_mas.planning.memory import TrainerSettings, activation_bytes
from rollout.models.architecture import read_architecture
from rollout.models.layout import ParallelLayout
from tests.exactness.training import TESTED_STEPS, Measurement, measure_rows
from tests.exactness.transformer_engine import (
    IN_FP8,
    MEASURED,
    REPLAYED,
    RESUMED,
    RESUMED_STEPS,
    ROWS,
    rows_with_transformer_engine,
    run_with_stand_in,
)

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train everything in a process with the stand-in; return the folder with the results."""
    folder: Path = tmp_path_factory.mktemp("te")
    run_with_stand_in(str(folder))
    return folder


@pytest.fixture(scope="module")
def measurements(folder: Path) -> dict[str, Measurement]:
    """Return the errors of each row, by name."""
    results = measure_rows(rows_with_transformer_engine(), folder, TESTED_STEPS)
    return {row.name: result for row, result in zip(ROWS, results, strict=True)}


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_row_is_exact(measurements: dict[str, Measurement], name: str) -> None:
    # `measure_rows` also asserts that the exported weights are those of the Hugging Face folder.
    print(measurements[name])
    assert not measurements[name].excessive


def largest_difference(left: Path, right: Path) -> float:
    """Return the largest difference between the weights in two files."""
    weights = torch.load(left, weights_only=True)
    others = torch.load(right, weights_only=True)
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_is_resumed_with_other_layers_and_in_another_layout(
    folder: Path, name: str
) -> None:
    uninterrupted = folder / name / f"weights_{RESUMED_STEPS - 1}.pt"
    resumed = folder / f"{name}, resumed" / "weights.pt"
    # A step of Adam changes a weight by up to the learning rate, 1e-3.
    assert largest_difference(resumed, uninterrupted) < 2e-6
    assert largest_difference(resumed, folder / name / "weights_0.pt") > 5e-4


@pytest.mark.parametrize("name", list(REPLAYED)[1:])
def test_recorded_experts_are_used(folder: Path, name: str) -> None:
    local = folder / "replayed local" / "weights_0.pt"
    assert largest_difference(folder / f"replayed {name}" / "weights_0.pt", local) < 2e-6


def read_history(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the metrics of a training of `IN_FP8`."""
    history: list[dict[str, Any]] = json.loads(
        (folder / f"fp8 {name}" / "history.json").read_text()
    )
    return history


@pytest.mark.parametrize("name", IN_FP8)
def test_products_in_fp8_are_near_those_in_bfloat16(folder: Path, name: str) -> None:
    is_mixture = name.startswith("experts")
    in_bfloat16 = read_history(folder, "experts, bfloat16" if is_mixture else "bfloat16")
    history = read_history(folder, name)
    for metrics, others in zip(history, in_bfloat16, strict=True):
        for metric in ("agent/a/loss", "agent/b/loss", "grad_norm"):
            assert metrics[metric] == pytest.approx(others[metric], rel=0.1)
    assert (history == in_bfloat16) == ("bfloat16" in name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_products_that_are_computed_again_in_fp8_have_the_same_bits(
    folder: Path, recompute: str
) -> None:
    assert read_history(folder, recompute) == read_history(folder, "none")


@pytest.mark.parametrize("name", MEASURED)
def test_a_plan_counts_what_the_layers_save(folder: Path, name: str) -> None:
    """Norms inside linear layers save their outputs, also where those before experts do not."""
    family, layout = MEASURED[name]
    measured = json.loads((folder / f"memory {name}" / "0.json").read_text())
    settings = TrainerSettings(
        bf16=layout.get("bf16", False),
        distributed_optimizer=False,
        recompute=layout.get("recompute", "none"),
        microbatch_tokens=measured["tokens"],
        fused=False,
        layers="te",
    )
    architecture = read_architecture(folder / f"measured_{family}")
    planned = activation_bytes(architecture, ParallelLayout(), settings)
    assert measured["activations"] == pytest.approx(planned, rel=0.1)


def test_the_bounds_of_fp8_let_right_weights_pass_and_stop_at_a_stale_tensor(folder: Path) -> None:
    metrics = json.loads((folder / "agreement.json").read_text())
    right, stale = metrics["float8"]
    assert not describe_disagreement(right, GAP_BOUNDS["float8"])
    assert describe_disagreement(stale, GAP_BOUNDS["float8"]).startswith("agent/solver: ")

    # The bounds are to gaps in FP8 as those of bfloat16 are to gaps in bfloat16, or wider.
    right_in_bfloat16, _ = metrics["bfloat16"]
    for figure, bound in GAP_BOUNDS["float8"].items():
        name = f"agent/solver/logprob_gap_{figure}"
        assert right_in_bfloat16[name] < right[name]
        assert right[name] / bound < right_in_bfloat16[name] / GAP_BOUNDS["bfloat16"][figure]


def test_the_hugging_face_folder_has_the_same_bits(folder: Path) -> None:
    written = load_file(folder / "hugging_face" / "model.safetensors")
    original = load_file(folder / "written" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
