"""Memory of a long training does not grow: 300 steps with rank, engine and controller in one process.

`python -m tests.faults.slope [STEPS]` fits a line through the resident memory. It leaves out the first
third of the steps, and takes the lowest value of every ten further steps. The slope minus three
standard errors may be no larger than the few numbers that a run stores for each step.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from mcore_mas.training import train
from mcore_mas.training.metrics import StepMetrics
from tests.faults.forked import run_folder
from tests.support.in_process import training_here

WINDOW = 10
ALLOWED_KIB = 0.5  # growth per step by the numbers that a run keeps; 10,000 steps are 5 MiB
MAX_NOISE_KIB = 1.0  # three standard errors; with more noise the test proves nothing


def main(steps: int) -> None:
    """Train, print the slope, and assert that memory does not grow."""
    resident_bytes = np.ones(steps)  # after each step; allocated before the first one
    process = psutil.Process()

    async def measure(number: int, metrics: StepMetrics) -> bool:
        if number % WINDOW == 0:  # returns memory that the allocator keeps for later
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        resident_bytes[number] = process.memory_info().rss
        return True

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # Torch records the last 2,000 collectives; until then that is 9 KiB a step.
        patch.setenv("TORCH_FR_BUFFER_SIZE", "0")
        config = run_folder(Path(folder)) / "config.yaml"
        values = yaml.safe_load(config.read_text())
        values["trainer"] |= {"steps": steps, "checkpoint_every": 10, "validate_every": 50}
        config.write_text(yaml.safe_dump(values))
        with training_here(patch):
            train.train(config, after_step=measure)

    after_warmup = resident_bytes[steps // 3 :] / 1024
    windows = after_warmup[: len(after_warmup) // WINDOW * WINDOW].reshape(-1, WINDOW)
    lowest_kib = windows.min(axis=1)
    positions = np.arange(len(lowest_kib)) * WINDOW
    (slope, _), covariance = np.polyfit(positions, lowest_kib, 1, cov=True)
    noise = 3 * float(covariance[0, 0]) ** 0.5
    lowest_mib = (lowest_kib / 1024).round(1).tolist()
    print(
        f"{steps} steps: {slope:+.2f} ± {noise:.2f} KiB a step; "
        f"MiB, the lowest of every {WINDOW}: {lowest_mib}"
    )
    assert noise <= MAX_NOISE_KIB
    assert slope - noise <= ALLOWED_KIB


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
