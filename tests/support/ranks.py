"""What each rank of a multi-process test runs; importable, so that spawned processes find it."""

import json
from pathlib import Path

import torch

from mcore_mas.megatron import parallel
from mcore_mas.megatron.trainer import MegatronTrainer, TrainerSpec
from mcore_mas.packing import pack


def train(rank: int, tp: int, port: int, model: str, out: str, samples: list, steps: int, max_tokens: int) -> None:
    """`steps` updates; rank 0 writes metrics, the weights after every step, and a checkpoint after the first."""
    parallel.start(rank=rank, tp=tp, address="127.0.0.1", port=port, threads=1)
    spec = TrainerSpec(model=model, tp=tp, lr=1e-3, eps=1e-4, loss="cross_entropy")
    trainer = MegatronTrainer(spec)
    history = []
    for step in range(steps):
        history.append(trainer.update(pack(samples, max_tokens)))
        weights = {name: tensor.clone() for name, tensor in trainer.weights()}
        if rank == 0:
            torch.save(weights, f"{out}/weights_{step}.pt")
        if step == 0:
            trainer.save(Path(out) / "checkpoint")
    if rank == 0:
        (Path(out) / "history.json").write_text(json.dumps(history))
    parallel.stop()


def resume(rank: int, tp: int, port: int, model: str, out: str, checkpoint: str, samples: list, steps: int) -> None:
    """Continue from `checkpoint` for `steps` updates; rank 0 writes the weights at the end."""
    parallel.start(rank=rank, tp=tp, address="127.0.0.1", port=port, threads=1)
    trainer = MegatronTrainer(TrainerSpec(model=model, tp=tp, lr=1e-3, eps=1e-4, loss="cross_entropy"))
    trainer.restore(Path(checkpoint))
    for _ in range(steps):
        trainer.update(pack(samples, 64))
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    if rank == 0:
        torch.save(weights, f"{out}/weights.pt")
    parallel.stop()
