"""Helpers of the sections of the kit: the device, its time, a trainer on it, and result lines."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.shapes import LAYOUTS, MODELS, make_batch, write_model
from mcore_mas.megatron.batch import Microbatch


def say(**figures: Any) -> None:
    """Print a result line."""
    print(json.dumps(figures), flush=True)


def device() -> torch.device:
    """Return the GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait until the GPU has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of `repeats` calls, after a first one as warm-up."""
    work()
    return statistics.median(time_call(work) for _ in range(repeats))


def start_trainer(
    folder: Path, model: str, layout: str, *, count: int = 1, **spec: Any
) -> tuple[Any, list[Microbatch]]:
    """Start a trainer with random weights, which are the same each time.

    Args:
        folder: folder for the model's config.
        model: name in `MODELS`.
        layout: name in `LAYOUTS`.
        count: number of micro-batches.
        spec: further fields of `TrainerSpec`.

    Returns:
        The trainer, and micro-batches for it.
    """
    from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
    from mcore_mas.megatron.state.tensor_sources import RandomTensors
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    init_process_groups(rank=0, threads=torch.get_num_threads())
    draw_on_cpu = RandomTensors.draw

    def draw_on_gpu(self: RandomTensors, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return draw_on_cpu(self, name)
        return torch.randn(shape, device="cuda").mul_(self.std).cpu()

    # Drawing billions of weights on the CPU would take all the time of a section.
    is_large = torch.cuda.is_available() and not model.startswith("tiny")
    torch.manual_seed(0)
    model_folder = write_model(model, folder / model)
    with patch.object(RandomTensors, "draw", draw_on_gpu) if is_large else nullcontext():
        trainer = MegatronTrainer(TrainerSpec(model=str(model_folder), init="random", **spec))
    vocab = int(MODELS[model]["vocab_size"])
    return trainer, [make_batch(LAYOUTS[layout], vocab=vocab, seed=i) for i in range(count)]


def stop_trainer() -> None:
    """Destroy the process groups, and free the GPU memory of deleted trainers."""
    from mcore_mas.megatron.spec import destroy_process_groups

    destroy_process_groups()
    gc.collect()  # the parts of a trainer form reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
