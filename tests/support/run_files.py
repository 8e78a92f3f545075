"""Files of small runs, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

CONFIG = {
    "run": "a",
    "seed": 1,
    "trainer": {"steps": 4, "group_size": 8},
    "policies": {"p": {"lr": 0.1}},
}


def write_small_run(folder: Path, scores: dict[str, float], **changed: object) -> Path:
    """Write a run of two steps with one evaluation; return its folder.

    Args:
        folder: of the run, whose name is the run's.
        scores: avg@2 of the trained team by task.
        changed: values of the config.
    """
    (folder / "train").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    config = {**CONFIG, "run": folder.name, **changed}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": -1, "validation/accuracy": 0.25},
        {"step": 0, "reward/mean": 0.5},
        {"step": 1, "reward/mean": 0.75},
    ]
    (folder / "train" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    mean = sum(scores.values()) / len(scores)
    evaluation = {
        "tasks": [{"task_id": task, "metrics": {"avg@2": score}} for task, score in scores.items()],
        "rows": [{"dataset": "s", "metric": "avg@2", "value": mean}],
    }
    (folder / "evaluation" / "trained.json").write_text(json.dumps(evaluation))
    return folder
