"""Training on a real SGLang server: the Ray actor, Megatron's trainer, weight updates, sleep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from mcore_mas.training.train import train
from rollout.records.files import read_trajectories
from tests.support.run_folder import make_run, metrics_of
from tests.support.sglang_server import server_settings

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.multirank]

SETTINGS = [
    "engine=sglang",
    "engine.max_length=512",
    "engine.slots=16",
    "+engine.start_s=1500",
    "+engine.sleep=true",
    "agents.verifier.policy=solver",
    "~policies.verifier",
    "cold_start.base.layers=2",
    "data.validation=1",
    # SGLang's samples cannot be seeded: a group of four has different rewards in every step.
    "trainer.group_size=4",
    "trainer.steps=2",
    "trainer.validate_every=2",
    # A random model earns this reward sometimes, so that every step has an update.
    "reward.name=tests.support.rewards:by_first_token",
    "~reward.penalties",
    "policies.solver.lr=1.0e-3",
    "policies.solver.warmup_steps=0",
]


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_trainer_and_engine_agree_and_every_step_updates_the_engine(
    sglang: str, transport: str, tmp_path: Path
) -> None:
    if "://" in sglang:
        pytest.skip("the server is to be started here")
    server = server_settings()
    run = make_run(
        tmp_path,
        *SETTINGS,
        f"+engine.transport={transport}",
        f"engine.python={Path(sglang).absolute()}",
        f"+engine.options={as_override(server['options'])}",
        f"+engine.environment={as_override(server['environment'])}",
    )
    train(run / "config.yaml")
    steps = [row for row in metrics_of(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert row["policy/solver/grad_norm"] > 0
        assert row["policy/solver/hand_over_mb"] > 0
        gaps = [value for name, value in row.items() if name.endswith("/logprob_gap_max")]
        # SGLang and Megatron compute the same weights differently.
        assert 0 < max(gaps) <= 1e-4
    for step in (0, 1):
        trajectories = read_trajectories(
            run / "train" / "trajectories" / f"step_{step:06d}.parquet"
        )
        versions = set()
        for trajectory in trajectories:
            versions |= {turn.policy_version for turn in trajectory.turns}
        assert versions == {step}


def as_override(values: Mapping[str, object]) -> str:
    """Return a mapping in the syntax of Hydra's overrides."""
    entries = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    return "{" + ", ".join(entries) + "}"
