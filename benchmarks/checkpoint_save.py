"""How much shorter a checkpoint stalls training than when training waits for its files to be on disk."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.training import make_model, make_sample, start_trainer
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import destroy_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack

GOAL = 3.0


def trained(folder: Path) -> MegatronTrainer:
    """A trainer of 54 million parameters, 650 MB of weights and moments, after one step, which makes the moments."""
    make_model(folder, vocab=16384, hidden=512, layers=10)
    trainer = start_trainer(folder, Objective(loss="cross_entropy"))
    trainer.update(pack([make_sample((1, 2, 3), (4, 5, 6))], 64))
    return trainer


def seconds(trainer: MegatronTrainer, folder: Path, *, wait: bool) -> tuple[float, float]:
    """How long training stands still, and how long it takes until the files are on disk."""
    began = time.perf_counter()
    trainer.save(folder)
    if wait:
        trainer.written()
    stall = time.perf_counter() - began
    if not wait:
        trainer.written()
    return stall, time.perf_counter() - began


def main() -> int:
    """Save in turns with and without waiting, print both, and say whether the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    stalls: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trained(Path(folder) / "model")
        for repeat in range(repeats + 1):
            for wait in (True, False):
                stall, done = seconds(trainer, Path(folder) / "checkpoint", wait=wait)
                if repeat:  # the first finds nothing in place: neither files nor memory
                    stalls[wait].append(stall)
                    print(
                        f"{'synchronous' if wait else 'asynchronous'}: stalls {stall:.2f} s, on disk in {done:.2f} s"
                    )
        destroy_process_groups()
    ratio = statistics.median(stalls[True]) / statistics.median(stalls[False])
    print(
        f"name=checkpoint_save ratio={ratio:.2f} goal={GOAL:.2f} reference=waiting for the disk n={repeats}"
    )
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
