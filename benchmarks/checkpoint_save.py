"""How much shorter a checkpoint stalls training than when training waits for its files to be on disk."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from transformers import Qwen2Config, Qwen2ForCausalLM, logging

from mcore_mas.core.losses import Objective
from mcore_mas.megatron import parallel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.trainer import MegatronTrainer
from mcore_mas.packing import pack
from mcore_mas.samples import Sample

GOAL = 3.0
MODEL = Qwen2Config(  # 50 million parameters: 600 MB of weights and moments
    vocab_size=16384,
    hidden_size=512,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=2048,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


def trained(folder: Path) -> MegatronTrainer:
    """A trainer after one step, so that it has moments to save."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(MODEL).save_pretrained(folder)
    parallel.start(rank=0, threads=1)
    trainer = MegatronTrainer(TrainerSpec(model=str(folder), objective=Objective(loss="cross_entropy")))
    ids = {"prompt_ids": (1, 2, 3), "completion_ids": (4, 5, 6)}
    names = {"policy": "p", "agent": "a", "task": "t", "trajectory": "0", "turn": 0}
    trainer.update(pack([Sample(**names, **ids, weight=1 / 3)], 64))
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
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stalls: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trained(Path(folder) / "model")
        for repeat in range(repeats + 1):
            for wait in (True, False):
                stall, done = seconds(trainer, Path(folder) / "checkpoint", wait=wait)
                if repeat:  # the first finds nothing in place: neither files nor memory
                    stalls[wait].append(stall)
                    print(f"{'synchronous' if wait else 'asynchronous'}: stalls {stall:.2f} s, on disk in {done:.2f} s")
        parallel.stop()
    ratio = statistics.median(stalls[True]) / statistics.median(stalls[False])
    print(f"name=checkpoint_save ratio={ratio:.2f} goal={GOAL:.2f} reference=waiting for the disk n={repeats}")
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
