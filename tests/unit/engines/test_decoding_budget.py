"""Cost of a decoding step on a GPU, as metered without one: a change that makes it slower fails here."""

import json
import subprocess
import sys
from typing import Any

import pytest

LAYERS = 24  # of the model 0.5b
# Kernels of a layer: two norms, four products, rotation, SwiGLU, and attention with the sum of its
# splits.
LAYER_LAUNCHES = 10
OTHER_LAUNCHES = 50  # kernels outside the layers, most of which sample


@pytest.fixture(scope="module")
def steps() -> dict[int, dict[str, Any]]:
    """Return the figures of a decoding step of the model 0.5b, by number of rows."""
    cases = [json.dumps({"rows": rows}) for rows in (1, 256)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.decode_meter", *cases]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line["rows"]: line for line in lines}


@pytest.mark.parametrize("rows", [1, 256])
def test_a_step_is_one_copy_there_a_few_kernels_and_one_copy_back(
    steps: dict[int, dict[str, Any]], rows: int
) -> None:
    step = steps[rows]
    assert step["launches"] <= LAYERS * LAYER_LAUNCHES + OTHER_LAUNCHES
    assert step["uploads"] == 1
    assert step["waits"] == {"gpu_steps.py sampled": 1}
    assert step["copies"] == {}
    assert step["mixed"] == {}


def test_kernels_leave_time_for_the_host(steps: dict[int, dict[str, Any]]) -> None:
    """The goals on an H100: 500 tokens a second with one row, and 40,000 with 256."""
    assert steps[1]["kernels_ms"] < 0.75 * 1e3 / 500
    assert steps[256]["kernels_ms"] < 0.75 * 1e3 * 256 / 40_000
