"""Effective sample size of an update, and the learning rate that is scaled by it, on one rank."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from tests.support import ranks, reference

pytestmark = pytest.mark.usefixtures("one_rank")

SAMPLES = reference.make_samples()
LR = 1e-3


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    reference.make_model("qwen2", tmp_path)
    objective = Objective(loss="reinforce")
    return ranks.make_spec(str(tmp_path), lr=LR, objective=objective, effective_samples=True)


def sampled_by_older_weights(spec: TrainerSpec) -> list[Sample]:
    """Return samples of two agents, the first of which has a weight of 3 and the others of 1."""
    batches = pack(SAMPLES, 1000)
    rows = unpack(batches, MegatronTrainer(spec).score(batches), SAMPLES)
    samples = []
    for sample, row in zip(SAMPLES, rows, strict=True):
        behaviour = list(row)
        if sample is SAMPLES[0]:
            behaviour[0] -= math.log(3)
        samples.append(
            replace(sample, behaviour=tuple(behaviour), advantages=(1.0,) * len(behaviour))
        )
    return samples


# The weights are 3, 1, 1, 1, 1, 1, so the effective sample size is 8² / (9 + 5).
SIZE = 64 / 14


def update(spec: TrainerSpec) -> tuple[dict[str, float], float]:
    """Return the metrics of an update, and the norm of the change of one weight."""
    trainer = MegatronTrainer(spec)
    before = ranks.copy_weights(trainer)
    metrics = trainer.update(pack(sampled_by_older_weights(spec), 12))
    after = ranks.copy_weights(trainer)
    name = "model.layers.1.mlp.up_proj.weight"
    return metrics, float((after[name] - before[name]).norm())


def test_the_size_is_that_of_all_agents_and_may_scale_the_learning_rate(spec: TrainerSpec) -> None:
    metrics, change = update(spec)
    assert metrics["effective_sample_size"] == pytest.approx(SIZE, rel=1e-4)
    assert metrics["effective_sample_share"] == pytest.approx(SIZE / 6, rel=1e-4)
    assert metrics["lr"] == LR
    assert not [name for name in metrics if name.endswith("reply_weight_count")]

    scaled_metrics, scaled_change = update(replace(spec, scales_lr=True))
    scale = math.sqrt(SIZE / 6)
    assert scaled_metrics["lr"] == pytest.approx(scale * LR, rel=1e-4)
    assert scaled_change == pytest.approx(scale * change, rel=1e-3)


def test_the_size_is_measured_only_where_it_is_asked_for(spec: TrainerSpec) -> None:
    trainer = MegatronTrainer(replace(spec, effective_samples=False))
    metrics = trainer.update(pack(sampled_by_older_weights(spec), 12))
    assert not [name for name in metrics if "effective" in name or "repl" in name]
