"""CPU time of generation in deterministic mode, against the default mode; agreement of trainer and engine."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.embedded_engine import MAX_LENGTH, VOCAB, make_load, run_engine
from benchmarks.support.result import print_result
from benchmarks.support.training import make_model, make_sample
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion

SEED = 3
GOAL = 2.0
MICROBATCH_TOKENS = 4096


class RecordingEngine(EmbeddedEngine):
    """Engine that records the prompt and the completion of every request."""

    def step(self) -> list[tuple[int, Completion]]:
        prompts = {request.id: request.prompt.tolist() for request in self._waiting}
        self.prompts = getattr(self, "prompts", {}) | prompts
        finished = super().step()
        pairs = [(self.prompts[number], completion) for number, completion in finished]
        self.completions = [*getattr(self, "completions", []), *pairs]
        return finished


def recorded_samples(engine: RecordingEngine) -> list[Sample]:
    """Return the recorded completions as samples with the engine's log-probabilities."""
    return [
        replace(make_sample(prompt, completion.token_ids, number), behaviour=completion.logprobs)
        for number, (prompt, completion) in enumerate(engine.completions)
    ]


def describe_agreement(trainer: MegatronTrainer, samples: Sequence[Sample], share: bool) -> str:
    """Describe the gap between the log-probabilities of the trainer and of the engine."""
    batches = pack(samples, MICROBATCH_TOKENS, share=share)
    trainer_rows = unpack(batches, trainer.score(batches), samples)
    trainer_logprobs = torch.tensor([value for row in trainer_rows for value in row])
    engine_logprobs = torch.tensor([value for sample in samples for value in sample.behaviour])
    gap = trainer_logprobs - engine_logprobs
    k3 = (gap.expm1() - gap).mean()
    equal_share = (gap == 0).float().mean()
    return (
        f"largest gap {gap.abs().max():.1e}, k3 divergence {k3:.1e}, {100 * equal_share:.1f} % of "
        f"{len(gap)} equal to the bit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    load = make_load(SEED)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=128, layers=4)
        init_process_groups(rank=0, threads=1)
        spec = TrainerSpec(model=folder, objective=Objective(), deterministic=True)
        trainer = MegatronTrainer(spec)
        for _ in range(repeats):
            default = RecordingEngine.from_folder(folder, max_length=MAX_LENGTH)
            default_s = run_engine(default, load, SEED)
            deterministic = RecordingEngine.from_folder(
                folder, max_length=MAX_LENGTH, deterministic=True
            )
            deterministic_s = run_engine(deterministic, load, SEED)
            ratios.append(deterministic_s / default_s)
            print(
                f"default {default_s:.2f} s, deterministic {deterministic_s:.2f} s",
                deterministic.stats,
            )
        samples = recorded_samples(deterministic)
        for share in (False, True):
            agreement = describe_agreement(trainer, samples, share)
            print(f"prefixes shared by the trainer: {share}; {agreement}")
    print_result(
        "deterministic_mode",
        statistics.median(ratios),
        goal=GOAL,
        at_most=True,
        reference="batched",
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
