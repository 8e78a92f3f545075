"""Bounds on the gap between engine and trainer in bfloat16, in a shallow model."""

from pathlib import Path

import pytest

from tests.exactness.agreement import LAYER_COUNTS, compare_engines, stop_reason, train_model

pytestmark = pytest.mark.usefixtures("one_rank")


# `make exactness` measures the other depths too.
@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYER_COUNTS[:1])
def test_right_weights_pass_and_a_stale_tensor_stops_the_run(layers: int, tmp_path: Path) -> None:
    trained = train_model(layers)
    right, stale = list(trained.stale_weights)[:2]
    stale_weights = {name: trained.stale_weights[name] for name in (right, stale)}
    metrics = compare_engines(trained, stale_weights, tmp_path)
    # Engine and trainer round differently, so they do not agree to the bit.
    assert metrics[right]["agent/solver/logprob_gap_max"] > 0
    assert not stop_reason(metrics[right])
    assert stop_reason(metrics[stale]).startswith("agent/solver: ")
