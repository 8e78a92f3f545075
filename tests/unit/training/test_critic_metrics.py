"""Metrics of a critic under its own name, with the variance that it explains."""

import pytest

from mcore_mas.training.policy_trainer import critic_metrics

# values 1 and 2, returns 1 and 3: errors 0 and 1
SOLVER = {"value_error": 0.5, "value_error_squared": 0.5, "return": 2.0, "return_squared": 5.0}
# values 1 and 2, returns 3 and 3
VERIFIER = {"value_error": 1.5, "value_error_squared": 2.5, "return": 3.0, "return_squared": 9.0}


def test_explained_variance_by_agent_where_returns_differ() -> None:
    trained = {"grad_norm": 0.25}
    trained |= {f"agent/solver/{name}": value for name, value in SOLVER.items()}
    trained |= {f"agent/verifier/{name}": value for name, value in VERIFIER.items()}
    metrics = critic_metrics(trained)
    assert metrics["critic/grad_norm"] == 0.25
    assert metrics["agent/solver/critic/return"] == 2.0
    assert metrics["agent/solver/critic/explained_variance"] == pytest.approx(1 - 0.25 / 1)
    assert "agent/verifier/critic/explained_variance" not in metrics
    assert len(metrics) == 1 + 4 + 1 + 4
    assert critic_metrics({}) == {}
