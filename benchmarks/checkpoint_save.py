"""Time for which a background checkpoint stalls training, against waiting until its files are on disk."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from benchmarks.support.training import make_model, make_sample, start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import destroy_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack

GOAL = 3.0


def make_trainer(folder: Path) -> MegatronTrainer:
    """Return a trainer with 54 million parameters after one step: 650 MB of weights and moments."""
    make_model(folder, vocab=16384, hidden=512, layers=10)
    trainer = start_trainer(folder, Objective(loss="cross_entropy"))
    trainer.update(pack([make_sample((1, 2, 3), (4, 5, 6))], 64))  # allocates the moments
    return trainer


def save(trainer: MegatronTrainer, folder: Path, *, wait: bool) -> tuple[float, float]:
    """Save a checkpoint; return the seconds of the stall, and those until the files are on disk."""
    began = time.perf_counter()
    trainer.save(folder)
    if wait:
        trainer.wait_written()
    stall_s = time.perf_counter() - began
    if not wait:
        trainer.wait_written()
    return stall_s, time.perf_counter() - began


def main() -> int:
    """Save in turns with and without waiting; return 0 if the goal is reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    synchronous_s: list[float] = []
    asynchronous_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder) / "model")
        for repeat in range(repeats + 1):
            for label, stalls in (
                ("synchronous", synchronous_s),
                ("asynchronous", asynchronous_s),
            ):
                wait = stalls is synchronous_s
                stall_s, total_s = save(trainer, Path(folder) / "checkpoint", wait=wait)
                # The first repeat allocates files and memory, and is not counted.
                if repeat:
                    stalls.append(stall_s)
                    print(f"{label}: stalls {stall_s:.2f} s, on disk in {total_s:.2f} s")
        destroy_process_groups()
    ratio = statistics.median(synchronous_s) / statistics.median(asynchronous_s)
    print_result(
        "checkpoint_save", ratio, goal=GOAL, reference="waiting for the disk", repeats=repeats
    )
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
