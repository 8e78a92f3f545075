"""What sections of the kit share: the device, its time, a trainer on it, and lines of what was found."""

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
    """Print a line of results."""
    print(json.dumps(figures), flush=True)


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settle() -> None:
    """Wait until the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def once(work: Callable[[], object]) -> float:
    """The seconds of a call."""
    settle()
    began = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - began


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median time of a call after one to warm up."""
    work()
    return statistics.median(once(work) for _ in range(repeats))


def start_trainer(
    folder: Path, model: str, layout: str, *, count: int = 1, **spec: Any
) -> tuple[Any, list[Microbatch]]:
    """A trainer of one of `MODELS`, whose weights are the same each time, and micro-batches for it."""
    from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
    from mcore_mas.megatron.state.weight_import import RandomTensors
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    init_process_groups(rank=0, threads=torch.get_num_threads())
    plain = RandomTensors._draw

    def there(self: RandomTensors, name: str) -> Tensor:
        if len(shape := self.shapes[name]) == 1:
            return plain(self, name)
        return torch.randn(shape, device="cuda").mul_(self.std).cpu()

    # on the CPU, drawing billions of weights would take all of the time
    large = torch.cuda.is_available() and not model.startswith("tiny")
    torch.manual_seed(0)
    with patch.object(RandomTensors, "_draw", there) if large else nullcontext():
        trainer = MegatronTrainer(
            TrainerSpec(model=str(write_model(model, folder / model)), init="random", **spec)
        )
    vocab = int(MODELS[model]["vocab_size"])
    return trainer, [make_batch(LAYOUTS[layout], vocab=vocab, seed=i) for i in range(count)]


def stop_trainer() -> None:
    """Leave its process groups; what nobody holds any more goes back to the GPU."""
    from mcore_mas.megatron.spec import destroy_process_groups

    destroy_process_groups()
    gc.collect()  # parts of a trainer hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
