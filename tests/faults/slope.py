"""Memory of a long training: 300 steps in one process, in which rank, engine and controller are; its slope is none.

`python -m tests.faults.slope [STEPS]`. The first third warms up; of the rest the lowest of every ten steps counts.
What is left after three standard errors of the same run's noise may be no more than a step's own numbers.
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
ALLOWED_KIB = 0.5  # a step, of what is known of each: its versions; 10,000 steps are 5 MiB
NOISE_KIB = 1.0  # of three standard errors: with more nothing is said


def main(steps: int) -> None:
    """Raises AssertionError if memory grows."""
    resident = np.ones(steps)  # bytes, which are there before the first step

    process = psutil.Process()

    async def seen(number: int, metrics: StepMetrics) -> bool:
        if number % WINDOW == 0:  # what is free and kept for later is not held
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        resident[number] = process.memory_info().rss
        return True

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "TORCH_FR_BUFFER_SIZE", "0"
        )  # torch's ring of the last 2,000 collectives: 9 KiB a step until then
        config = run_folder(Path(folder)) / "config.yaml"
        values = yaml.safe_load(config.read_text())
        values["trainer"] |= {"steps": steps, "checkpoint_every": 10, "validate_every": 50}
        config.write_text(yaml.safe_dump(values))
        with training_here(patch):
            train.train(config, after_step=seen)
    kept = resident[steps // 3 :] / 1024
    lowest = kept[: len(kept) // WINDOW * WINDOW].reshape(-1, WINDOW).min(axis=1)
    at = np.arange(len(lowest)) * WINDOW
    (slope, _), covariance = np.polyfit(at, lowest, 1, cov=True)
    noise = 3 * float(covariance[0, 0]) ** 0.5
    mib = (lowest / 1024).round(1).tolist()
    print(
        f"{steps} steps: {slope:+.2f} ± {noise:.2f} KiB a step; MiB, the lowest of every {WINDOW}: {mib}"
    )
    assert noise <= NOISE_KIB
    assert slope - noise <= ALLOWED_KIB


if __name__ == "__main__":
    main(int(*sys.argv[1:] or ["300"]))
