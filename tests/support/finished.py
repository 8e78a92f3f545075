"""Files of a run that has finished, with numbers that a reader can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.metrics_log import STEP_TIME
from rollout.base.files import write_text
from rollout.base.json_files import write_json

STEPS = 20


def finished(
    results: Path, run: str, seed: int, suite: str = "pages", experiment: str = "duo"
) -> RunConfig:
    """Write the files of a run of two agents; return its config.

    The reward is 0.2 + 0.02 * step + 0.1 * seed. Every fifth step is validated.
    """
    values = resolve(
        [
            "experiment=demo_math",
            f"run={run}",
            f"results={results}",
            f"seed={seed}",
            f"trainer.steps={STEPS}",
            f"+tracking.tags.suite={suite}",
            f"+tracking.tags.experiment={experiment}",
        ]
    )
    config = RunConfig.from_values(values, run)
    write_text(config.folder / "config.yaml", yaml.safe_dump(values))
    rows = [_row(step, seed) for step in range(STEPS)]
    write_text(
        config.folder / "train" / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    devices = {"kind": "GPU", "count": 2, "name": "H100"}
    write_json(
        config.folder / "train" / "done.json", {"policies": config.models, "devices": devices}
    )
    scores = [{"dataset": "all", "metric": "avg@4", "value": 0.5 + 0.1 * seed}]
    counts = {"replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(config.folder / "evaluation" / "trained.json", {"k": 4, **counts, "rows": scores})
    return config


def _row(step: int, seed: int) -> dict[str, Any]:
    row = {
        "step": step,
        "reward/mean": 0.2 + 0.02 * step + 0.1 * seed,
        STEP_TIME: 1.7e9 + 60 * step,
        "time/collect_s": 40.0,
        "time/update_s": 20.0,
        "rollout/tokens": 1000.0,
        "rollout/failed": 0.0,
        "agent/solver/reward_mean": 0.1 * seed + 0.03 * step,
        "agent/verifier/reward_mean": 0.1 * seed + 0.02 * step,
    }
    if step % 5 == 4:
        row["validation/accuracy"] = 0.3 + 0.025 * step + 0.05 * seed
    return row
