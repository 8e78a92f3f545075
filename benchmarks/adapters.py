"""Memory of four agents with adapters on one model over one's, peak and kept, in a trainer's rank and an engine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

import torch

from benchmarks.support.training import LR, make_model, make_sample
from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.models.fused_weights import AdapterShape
from rollout.models.layout import Projection
from rollout.models.tensors import read_tensors
from rollout.records.trajectory import Sampling
from rollout.sync.shared import SharedWeights

AGENTS, HIDDEN, LAYERS, VOCAB, TOKENS, ROWS = 4, 640, 12, 16384, 256, 8
RANK = 4  # 0.6 % of the hidden size, which is what rank 16 is of Qwen3-4B's: an adapter is as large beside its model
KINDS = {
    "one": (1, True),
    "together": (AGENTS, False),
    "apart": (AGENTS, True),
}  # agents, each on a model of its own


def memory() -> dict[str, float]:
    """GiB of this process: the most so far, and what it has of its own now, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {
        name: int(status[name].split()[0]) / 2**20 for name in ("VmHWM", "RssAnon", "RssShmem")
    }
    return {"at its peak": sizes["VmHWM"], "kept": sizes["RssAnon"] + sizes["RssShmem"]}


def train(folder: str, agents: int, apart: bool) -> object:
    """Two updates of every agent; what holds them."""
    init_process_groups(rank=0, threads=1)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = pack([make_sample(ids[: TOKENS // 2], ids[TOKENS // 2 :])], TOKENS)
    spec = TrainerSpec(model=folder, lr=LR, objective=Objective())
    trainers: list[MegatronTrainer] = []
    for seed in range(agents):
        own = replace(spec, lora=LoraConfig(rank=RANK, alpha=2.0 * RANK), lora_seed=seed)
        trainers.append(MegatronTrainer(own, trainers[0] if trainers and not apart else None))
    for trainer in 2 * trainers:
        trainer.update(batches)
    return trainers


def play(folder: str, agents: int, apart: bool) -> object:
    """As many replies by every agent's engine as by the one that has all adapters; what holds them."""
    shape = read_architecture(folder)
    adapter = AdapterShape(rank=RANK, scale=2.0, targets=get_args(Projection))
    engines, places = [], []
    for numbers in [[n] for n in range(agents)] if apart else [range(agents)]:
        decoder = CachedDecoder(shape, TOKENS, adapters=[adapter for _ in numbers])
        decoder.load(read_tensors(folder))
        assert decoder.adapters is not None
        for number, _ in enumerate(
            numbers, 1
        ):  # as an actor maps what a trainer writes: this version and the next
            places.append(SharedWeights(None, shape, adapter))
            for half in places[-1].halves:
                half.fill((name, torch.zeros(size)) for name, (size, _) in half.places.items())
                decoder.adapters.put(number, half)
        engines.append(EmbeddedEngine(decoder, rows=ROWS // agents if apart else ROWS))
    for number in range(ROWS):
        own = engines[number % len(engines)]
        prompt, adapter_of = [number + 1] * (TOKENS // 2), 1 if apart else 1 + number % agents
        own.submit(
            number, prompt, Sampling(max_tokens=TOKENS // 4, seed=number), adapter=adapter_of
        )
    for engine in engines:
        while engine.has_work:
            engine.step()
    return engines, places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs=3,
        metavar=("PART", "KIND", "FOLDER"),
        help="print the peak GiB of one process",
    )
    only = parser.parse_args().only
    if only:
        part, kind, folder = only
        torch.set_num_threads(1)
        read_architecture(folder)
        before = memory()
        held = {"trainer": train, "engine": play}[part](folder, *KINDS[kind])
        after = memory()
        print(*(after[name] - before[name] for name in after))
        del held
        return
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        for part in ("trainer", "engine"):
            found = {}
            for kind in KINDS:
                command = [sys.executable, __file__, "--only", part, kind, folder]
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found[kind] = [float(number) for number in run.stdout.splitlines()[-1].split()]
            for what, one, together, apart in zip(memory(), *found.values(), strict=True):
                ratios.append(together / one)
                print(
                    f"{part}, {what}: one agent {one:.3f} GiB; {AGENTS} agents on one model {together:.3f} "
                    f"({together / one:.2f} times), on {AGENTS} {apart:.3f} ({apart / one:.2f})"
                )
    print(f"name=adapters ratio={max(ratios):.2f} at_most=1.15 reference=one_agent n=1")


if __name__ == "__main__":
    main()
