"""Memory of four agents with LoRA adapters on one shared model, relative to one agent: in a trainer and in an engine.

For comparison it also measures four agents with a model each. Each figure is measured in a separate
process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support.process import PEAK, UNMAPPED, memory_bytes
from benchmarks.support.result import print_result
from benchmarks.support.training import LR, make_model, make_sample
from mcore_mas.config.policy import LoraConfig
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.adapter_weights import AdapterShape
from rollout.models.architecture import read_architecture
from rollout.models.layout import Projection
from rollout.models.tensors import read_tensors
from rollout.records.trajectory import Sampling
from rollout.sync.shared import SharedWeights

AGENTS = 4
HIDDEN = 640
LAYERS = 12
VOCAB = 16384
TOKENS = 256
ROWS = 8  # concurrent replies of all agents
# The rank is 0.6 % of the hidden size, like rank 16 in Qwen3-4B, so that the adapter has about the
# same share of the model.
RANK = 4
GOAL = 1.15


@dataclass(frozen=True, slots=True)
class Setup:
    """Number of agents, and whether each of them has a model of its own."""

    agents: int
    separate: bool


SETUPS = {
    "one": Setup(agents=1, separate=True),
    "shared": Setup(agents=AGENTS, separate=False),
    "separate": Setup(agents=AGENTS, separate=True),
}


def train(folder: str, setup: Setup) -> object:
    """Update every agent twice, and return the trainers, so that their memory stays allocated."""
    init_process_groups(rank=0, threads=1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator).tolist()
    batches = pack([make_sample(ids[: TOKENS // 2], ids[TOKENS // 2 :])], TOKENS)
    spec = TrainerSpec(model=folder, lr=LR, objective=Objective())
    trainers: list[MegatronTrainer] = []
    for seed in range(setup.agents):
        lora = LoraConfig(rank=RANK, alpha=2.0 * RANK)
        base = trainers[0] if trainers and not setup.separate else None
        trainers.append(MegatronTrainer(replace(spec, lora=lora, lora_seed=seed), base))
    for trainer in 2 * trainers:
        trainer.update(batches)
    return trainers


def generate(folder: str, setup: Setup) -> object:
    """Generate `ROWS` replies in all, and return the engines and weights, so that their memory stays allocated."""
    architecture = read_architecture(folder)
    adapter = AdapterShape(rank=RANK, scale=2.0, targets=get_args(Projection))
    adapters_per_engine = 1 if setup.separate else setup.agents
    engine_count = setup.agents // adapters_per_engine
    engines = []
    weights = []
    for _ in range(engine_count):
        decoder = CachedDecoder(architecture, TOKENS, adapters=[adapter] * adapters_per_engine)
        decoder.load(read_tensors(folder))
        assert decoder.adapters is not None
        for number in range(1, adapters_per_engine + 1):
            # An actor maps two versions of the weights that a trainer writes: this one and the next.
            shared_weights = SharedWeights(None, architecture, adapter)
            weights.append(shared_weights)
            for half in shared_weights.halves:
                half.fill(
                    (name, torch.zeros(buffer.shape)) for name, buffer in half.buffers.items()
                )
                decoder.adapters.put(number, half)
        engines.append(EmbeddedEngine(decoder, rows=ROWS // engine_count))

    for number in range(ROWS):
        engine = engines[number % engine_count]
        prompt = [number + 1] * (TOKENS // 2)
        sampling = Sampling(max_tokens=TOKENS // 4, seed=number)
        engine.submit(number, prompt, sampling, adapter=1 + number % adapters_per_engine)
    for engine in engines:
        while engine.has_work:
            engine.step()
    return engines, weights


PARTS: dict[str, Callable[[str, Setup], object]] = {"trainer": train, "engine": generate}


def measure_this_process(part: str, setup_name: str, folder: str) -> None:
    """Print the growth of this process in GiB: of its peak, and of its unmapped memory at the end."""
    torch.set_num_threads(1)
    read_architecture(folder)  # imports libraries that should not be counted
    peak_before = memory_bytes(PEAK)
    unmapped_before = memory_bytes(UNMAPPED)
    result = PARTS[part](folder, SETUPS[setup_name])
    peak = memory_bytes(PEAK) - peak_before
    unmapped = memory_bytes(UNMAPPED) - unmapped_before
    del result
    print(peak / 2**30, unmapped / 2**30)


def measure(part: str, setup_name: str, folder: str) -> tuple[float, float]:
    """Run `measure_this_process` in a new process; return peak and final memory in GiB."""
    command = [sys.executable, __file__, "--only", part, setup_name, folder]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peak, unmapped = map(float, process.stdout.splitlines()[-1].split())
    return peak, unmapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs=3,
        metavar=("PART", "SETUP", "FOLDER"),
        help="print the memory of one setup in GiB",
    )
    only = parser.parse_args().only
    if only:
        measure_this_process(*only)
        return

    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        for part in PARTS:
            one_agent = measure(part, "one", folder)
            shared = measure(part, "shared", folder)
            separate = measure(part, "separate", folder)
            for label, one_gib, shared_gib, separate_gib in zip(
                ("peak", "at the end"), one_agent, shared, separate, strict=True
            ):
                ratios.append(shared_gib / one_gib)
                print(
                    f"{part}, {label}: one agent {one_gib:.3f} GiB; {AGENTS} agents on one model "
                    f"{shared_gib:.3f} ({shared_gib / one_gib:.2f} times), on {AGENTS} models "
                    f"{separate_gib:.3f} ({separate_gib / one_gib:.2f})"
                )
    print_result("adapters", max(ratios), goal=GOAL, at_most=True, reference="one_agent", repeats=1)


if __name__ == "__main__":
    main()
