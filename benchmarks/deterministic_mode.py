"""The deterministic mode: its time to decode over the other mode's, and how far trainer and engine are apart."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.embedded_engine import MAX_LENGTH, VOCAB, make_load, run_engine
from benchmarks.support.training import make_model, make_sample
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion

SEED = 3


class Recording(EmbeddedEngine):
    """Keeps what it said."""

    def step(self) -> list[tuple[int, Completion]]:
        prompts = {r.id: r.prompt.tolist() for r in self._waiting}
        self.asked = getattr(self, "asked", {}) | prompts
        done = super().step()
        self.said = [*getattr(self, "said", []), *((self.asked[i], c) for i, c in done)]
        return done


def samples_of(engine: Recording) -> list[Sample]:
    """Its completions as turns."""
    return [
        replace(make_sample(prompt, c.token_ids, n), behaviour=c.logprobs)
        for n, (prompt, c) in enumerate(engine.said)
    ]


def agreement(trainer: MegatronTrainer, samples: list[Sample], share: bool) -> str:
    """How far the engine's log-probabilities are from the trainer's."""
    batches = pack(samples, 4096, share=share)
    scored = unpack(batches, trainer.score(batches), samples)
    ours = torch.tensor([p for s in samples for p in s.behaviour])
    gap = torch.tensor([p for one in scored for p in one]) - ours
    k3 = (gap.expm1() - gap).mean()
    equal = (gap == 0).float().mean()
    return f"largest gap {gap.abs().max():.1e}, k3 divergence {k3:.1e}, {100 * equal:.1f} % of {len(gap)} equal to the bit"  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    load, ratios = make_load(SEED), []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=128, layers=4)
        init_process_groups(rank=0, threads=1)
        trainer = MegatronTrainer(
            TrainerSpec(model=folder, objective=Objective(), deterministic=True)
        )
        for _ in range(repeats):
            seconds = {}
            for mode in (False, True):
                engine = Recording.from_folder(folder, max_length=MAX_LENGTH, deterministic=mode)
                seconds[mode] = run_engine(engine, load, SEED)
            ratios.append(seconds[True] / seconds[False])
            print({m: f"{s:.2f}" for m, s in seconds.items()}, engine.stats)
        samples = samples_of(engine)
        for share in (False, True):
            print(f"prefixes shared by the trainer: {share}; {agreement(trainer, samples, share)}")
    print(
        f"name=deterministic_mode ratio={statistics.median(ratios):.2f} at_most=2.00 reference=batched n={repeats}"
    )


if __name__ == "__main__":
    main()
