"""Rewarded trajectories of a run, and the run's config, which names the advantage estimator."""

from __future__ import annotations

from pathlib import Path

import yaml

from mcore_mas.config.compose import resolve
from rollout.records.files import write_trajectories
from tests.support.played import trajectory, turn


def write_rewarded_step(run: Path) -> Path:
    """Write two trajectories of one task with rewards 1 and 0, of a run trained with GRPO."""
    values = resolve(["experiment=demo_math", "advantage={name: grpo}", f"results={run}"])
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    trajectories = [
        trajectory(
            turn(0, policy="solver", text=f"it is {sample}", reward=1.0 - sample), sample=sample
        )
        for sample in (0, 1)
    ]
    path = run / "train" / "trajectories" / "step_000000.parquet"
    write_trajectories(path, trajectories)
    return path
