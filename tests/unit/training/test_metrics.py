"""Metrics of a critic under its own name, with the variance that it explains; and how fast policies are trained."""

import pytest

from mcore_mas.training.metrics import speed_metrics
from mcore_mas.training.policy_trainer import critic_metrics, merge_updates

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


def test_speed_is_of_all_seconds_of_all_devices() -> None:
    first = {"flops": 3e15, "device_s": 10.0, "peak_flops": 10 * 989e12}
    solver = merge_updates([first, {"flops": 1e15, "device_s": 10.0, "peak_flops": 10 * 989e12}])
    verifier = {"flops": 2e15, "device_s": 5.0, "critic/flops": 1e15, "critic/device_s": 15.0}
    assert speed_metrics({"solver": solver, "verifier": verifier}) == {
        "time/tflops": 7e3 / 40,
        "policy/solver/time/tflops": 200.0,
        "policy/solver/time/mfu": pytest.approx(200 / 989),
        "policy/verifier/time/tflops": 3e3 / 20,
    }
    # of a device whose peak nobody knows there is no share, nor of all of them
    assert speed_metrics({"solver": solver})["time/mfu"] == pytest.approx(200 / 989)
    assert speed_metrics({"solver": {"skipped_updates": 1.0}}) == {}
