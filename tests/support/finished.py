"""Files of a run that has finished, with numbers that a reader can follow."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.metrics_log import STEP_TIME
from rollout.base.files import write_json, write_text

STEPS = 20


def finished(
    results: Path, run: str, seed: int, suite: str = "pages", experiment: str = "duo"
) -> RunConfig:
    """The files of a run of two agents, whose reward rises by 0.02 a step, with the seed on top."""
    tags = [
        f"+tracking.tags.{name}={value}"
        for name, value in (("suite", suite), ("experiment", experiment))
    ]
    given = [f"run={run}", f"results={results}", f"seed={seed}", f"trainer.steps={STEPS}"]
    values = resolve(["experiment=demo_math", *given, *tags])
    config = RunConfig.check(values, run)
    write_text(config.folder / "config.yaml", yaml.safe_dump(values))
    rows = [
        {"step": step, "reward/mean": 0.2 + 0.02 * step + 0.1 * seed, STEP_TIME: 1.7e9 + 60 * step}
        | {
            "time/collect_s": 40.0,
            "time/update_s": 20.0,
            "rollout/tokens": 1000.0,
            "rollout/failed": 0.0,
        }
        | {
            f"agent/{name}/reward_mean": 0.1 * seed + 0.01 * step * n
            for name, n in (("solver", 3), ("verifier", 2))
        }
        | ({"validation/accuracy": 0.3 + 0.025 * step + 0.05 * seed} if step % 5 == 4 else {})
        for step in range(STEPS)
    ]
    write_text(
        config.folder / "train" / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    devices = {"kind": "GPU", "count": 2, "name": "H100"}
    done = {"policies": config.models, "devices": devices}
    write_json(config.folder / "train" / "done.json", done)
    scores = [{"dataset": "all", "metric": "avg@4", "value": 0.5 + 0.1 * seed}]
    counts = {"replies": 8, "overlong": 0, "cut": 0, "failed": {}}
    write_json(config.folder / "evaluation" / "trained.json", {"k": 4, **counts, "rows": scores})
    return config
