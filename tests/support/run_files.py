"""Files of small runs, whole and damaged, for tests of their readers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
        folder: run folder; the run gets its name.
        scores: avg@2 of the trained team by task.
        changed: values of the config that differ from `CONFIG`.
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


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a function that replaces a file of a run."""

    def damage(run: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (run / name).write_bytes(data)

    return damage


def _replace_by_folder(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def _replace_by_pipe(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return damage


def _replace_by_link(name: str, target: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(target)

    return damage


_METRICS = "train/metrics.jsonl"
_SCORES = "evaluation/trained.json"

# Damage to a run of `write_small_run`, by the file that is damaged.
CONFIG_DAMAGE = {
    "no YAML": _write("config.yaml", "a: [\n"),
    "a list": _write("config.yaml", "[1, 2]\n"),
    "empty": _write("config.yaml", ""),
    "not UTF-8": _write("config.yaml", b"a: \xff\n"),
    "a tag of another program": _write("config.yaml", "a: !!python/object:os.system {}\n"),
    "an impossible date": _write("config.yaml", "a: 2020-13-45\n"),
    "deep": _write("config.yaml", "a: " + "[" * 200 + "]" * 200),
    "very deep": _write("config.yaml", "a: " + "[" * 20_000 + "]" * 20_000),
    "a folder": _replace_by_folder("config.yaml"),
    "a pipe": _replace_by_pipe("config.yaml"),
    "an endless device": _replace_by_link("config.yaml", "/dev/zero"),
    "a link to nothing": _replace_by_link("config.yaml", "/nonexistent/config.yaml"),
}
TRAINER_DAMAGE = {
    "no trainer": _write("config.yaml", "run: a\n"),
    "a trainer without steps": _write("config.yaml", "run: a\ntrainer: {}\n"),
    "a trainer that is text": _write("config.yaml", "run: a\ntrainer: x\n"),
    "steps that are text": _write("config.yaml", "run: a\ntrainer: {steps: many}\n"),
    "negative steps": _write("config.yaml", "run: a\ntrainer: {steps: -1}\n"),
    "a huge number of steps": _write("config.yaml", f"run: a\ntrainer: {{steps: 1{'0' * 400}}}\n"),
}
METRICS_DAMAGE = {
    "a row without step": _write(_METRICS, '{"a": 1}\n'),
    "a step that is text": _write(_METRICS, '{"step": "x"}\n'),
    "a step that is null": _write(_METRICS, '{"step": 0}\n{"step": null}\n'),
    "a step that is a fraction": _write(_METRICS, '{"step": 0.5}\n'),
    "a huge step": _write(_METRICS, f'{{"step": 1{"0" * 400}}}\n'),
    "no JSON": _write(_METRICS, "\x00\x01\nabc\n"),
    "not UTF-8": _write(_METRICS, b"\xff\xfe\n"),
    "a folder": _replace_by_folder(_METRICS),
    "a pipe": _replace_by_pipe(_METRICS),
    "a link to nothing": _replace_by_link(_METRICS, "/nonexistent/metrics.jsonl"),
}
SCORES_DAMAGE = {
    "cut in half": _write(_SCORES, '{"rows": [{"met'),
    "no object": _write(_SCORES, "[]"),
    "no rows": _write(_SCORES, "{}"),
    "rows that are a number": _write(_SCORES, '{"rows": 1, "tasks": 1}'),
    "a row that is a number": _write(_SCORES, '{"rows": [1], "tasks": [1]}'),
    "a row without value": _write(
        _SCORES, '{"rows": [{"metric": "avg@2"}], "tasks": [{"task_id": "t"}]}'
    ),
    "a value that is text": _write(
        _SCORES,
        '{"rows": [{"metric": "avg@2", "value": "x"}], '
        '"tasks": [{"task_id": "t", "metrics": {"avg@2": "x"}}]}',
    ),
    "a value that is no number": _write(
        _SCORES,
        '{"rows": [{"metric": "avg@2", "value": NaN}], '
        '"tasks": [{"task_id": "t", "metrics": {"avg@2": NaN}}]}',
    ),
    "deep": _write(_SCORES, "[" * 200_000),
    "not UTF-8": _write(_SCORES, b"\xff"),
    "a folder": _replace_by_folder(_SCORES),
    "a pipe": _replace_by_pipe(_SCORES),
    "an endless device": _replace_by_link(_SCORES, "/dev/zero"),
}


def damage_cases(*kinds: dict[str, Callable[[Path], None]]) -> dict[str, list[object]]:
    """Return the arguments of `pytest.mark.parametrize` for kinds of damage, with their ids."""
    names = [name for damages in kinds for name in damages]
    functions = [damage for damages in kinds for damage in damages.values()]
    return {"argvalues": list(functions), "ids": names}
