"""A run stops where engine and trainer disagree, and says by how much and what to do."""

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.training.policy_trainer import PolicyTrainer

FIGURES = {"mean": 0.04, "k3": 0.002, "p99": 0.2, "max": 0.5, "count": 5000.0, "outlier_count": 0.0}
METRICS = {f"agent/solver/logprob_gap_{name}": value for name, value in FIGURES.items()} | {
    "grad_norm": 1.0
}


def check(*overrides: str) -> None:
    config = RunConfig.check(resolve(["experiment=demo_math", *overrides]), "test")
    PolicyTrainer("solver", config, None)._check_agreement(METRICS)  # type: ignore[arg-type]


def test_the_line_has_agent_figures_bounds_and_what_to_do() -> None:
    with pytest.raises(TrainingError) as caught:
        check("policies.solver.bf16=true")
    assert str(caught.value) == (
        "policy solver, agent/solver: the trainer's log-probabilities differ from the engine's by mean 0.04 (bound "
        "0.03), k3 0.002 (bound 0.005), p99 0.2 (bound 0.3), max 0.5 nats over 5000 tokens, more than bfloat16 rounds; "
        "engine and trainer do not hold the same weights: keep engine.verify on to find the tensor, or, if their "
        "kernels are known to differ by as much, widen trainer.agreement"
    )


def test_bounds_are_the_precisions_or_ones_own() -> None:
    check("policies.solver.bf16=true", "trainer.agreement={mean: 0.05}")
    with pytest.raises(TrainingError, match=r"max 0\.5 \(bound 0\.0001\)"):
        check("trainer.agreement={mean: 0.05}")
    with pytest.raises(TrainingError, match=r"max 0\.5 \(bound 0\.4\)"):
        check("policies.solver.bf16=true", "trainer.agreement={mean: 0.05, max: 0.4}")
