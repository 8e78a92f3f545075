"""Training of two policies with different parallel layouts on shared devices."""

import json
import math
from pathlib import Path

import pytest
import ray

from mcore_mas.planning.worker_groups import PlacementError
from mcore_mas.training.train import train
from tests.support.run_folder import make_run, metrics_of

SETTINGS = [
    "cold_start.base.layers=2",
    "policies.solver.tp=2",
    "+policies.solver.offload=true",
    "+policies.verifier.pp=2",
    "data.validation=1",
    "trainer.steps=2",
    "trainer.checkpoint_every=2",
    "trainer.validate_every=2",
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
    "+cluster.cpus=2",
]


@pytest.mark.slow
def test_a_placement_that_does_not_fit_is_refused_before_ray_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, *SETTINGS)
    with pytest.raises(PlacementError) as refusal:
        train(run / "config.yaml")
    assert str(refusal.value) == (
        "cluster.pool: split needs 6 CPUs "
        "(solver: trainer 2, engine 1; verifier: trainer 2, engine 1), and there are 2; "
        "use cluster.pool: shared, which needs 2, or more CPUs"
    )
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.multirank
def test_a_tensor_parallel_and_a_pipelined_policy_train_on_the_same_devices(
    forked_ray_workers: None, tmp_path: Path
) -> None:
    run = make_run(
        tmp_path,
        *SETTINGS,
        "+cluster.pool=shared",
        "+cluster.one_by_one=true",
        "+policies.verifier.offload=true",
        "+policies.verifier.host_moments=true",
    )
    train(run / "config.yaml")
    steps = [row for row in metrics_of(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        for policy in ("solver", "verifier"):
            assert row[f"policy/{policy}/grad_norm"] > 0
            # The engine has the weights of the ranks, also after an update.
            assert row[f"agent/{policy}/logprob_gap_max"] < 1e-4
    checkpoint = run / "train" / "checkpoints" / "step_000002"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert "solver/rank_00000.safetensors" in files
    assert "verifier/rank_00000.safetensors" in files
