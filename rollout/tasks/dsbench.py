"""DSBench's data-modeling tasks (arXiv 2409.07703) from its folder, as its repository and archive lay it out.

data.json                               one object a line, with `name`
data/task/NAME.txt                      the task as it is described
data/data_resplit/NAME/                 train.csv, test.csv, sample_submission.csv
data/answers/NAME/test_answer.csv       the truths
evaluation/NAME_eval.py                 read, never run: which metric, which column
save_performance/{baseline,GT}/NAME/result.txt    the ends of the performance gap, where they are there
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from rollout.base.seeds import derive_seed
from rollout.environments.data_science import SUBMISSION, pack_file_at, pack_target
from rollout.environments.predictions import METRICS, Target
from rollout.records.trajectory import RecordError, Task

_SIGNS = (  # of a metric, where an evaluation script computes its result; the first that is found counts
    ("auc", r"roc_auc_score"),
    ("accuracy", r"accuracy_score|average='micro'|=="),
    ("f1", r"f1_score"),
    ("log_loss", r"log_loss"),
    ("rmsle", r"rmsle|mean_squared_log_error"),
    ("rmse", r"rmse|root_mean_squared_error|sqrt\(\s*mean_squared_error|squared=False"),
    ("mae", r"mean_absolute_error"),
    ("mse", r"mean_squared_error"),
)
_RESULT = re.compile(r"^\s*performance\s*=(.*)$", re.MULTILINE)  # imports and helpers name metrics that are not used
_VALUE = re.compile(r"""["']--value["'].*?default\s*=\s*["']([^"']+)["']""", re.DOTALL)
_NOTE = f"\n\nThe files are in the working folder. Write `{SUBMISSION}` in the form of sample_submission.csv."


def generate(
    seed: int, sizes: Mapping[str, int], *, folder: str, metrics: Mapping[str, str] | None = None
) -> list[Task]:
    """sizes[split] tasks for each split, drawn without replacement from those that can be scored, by `seed`.

    Args:
        folder: DSBench's `data_modeling`, with data.zip unpacked in it.
        metrics: names in METRICS by task, for those whose script does not say; others that do not are left out.

    Raises:
        RecordError: a file is missing or of another form.
        ValueError: there are fewer tasks than asked for.
    """
    tasks = read(Path(folder), metrics or {})
    wanted = sum(sizes.values())
    if wanted > len(tasks):
        raise ValueError(f"dsbench: {wanted} tasks asked for, but {folder} has {len(tasks)} that can be scored")
    drawn = iter(Random(derive_seed(seed, "dsbench")).sample(tasks, wanted))
    splits = [split for split, size in sizes.items() for _ in range(size)]
    return [replace(task, split=split) for task, split in zip(drawn, splits, strict=True)]


def read(folder: Path, metrics: Mapping[str, str]) -> list[Task]:
    """Every task of the folder that can be scored, in its order, as a test task.

    Raises:
        RecordError: see `generate`.
    """
    index = folder / "data.json"
    if not index.is_file():
        raise RecordError(f"{index}: no such file; expected DSBench's data_modeling folder")
    names = []
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines()):
        if line.strip():
            try:
                names.append(str(json.loads(line)["name"]))
            except (ValueError, KeyError, TypeError) as error:
                raise RecordError(f"{index}: row {number} is no object with a name ({error})") from error
    found = (_task(folder, name, metrics.get(name)) for name in names)
    return [task for task in found if task is not None]


def metric_of(script: str) -> str | None:
    """The metric that an evaluation script computes last; None when it is none of ours."""
    results = _RESULT.findall(script)
    return next((metric for metric, sign in _SIGNS if results and re.search(sign, results[-1])), None)


def _task(folder: Path, name: str, metric: str | None) -> Task | None:
    data = folder / "data"
    script = _text(folder / "evaluation" / f"{name}_eval.py")
    metric = metric or metric_of(script)
    if metric is not None and metric not in METRICS:
        raise RecordError(f"{folder}: metric '{metric}' of {name} is not known; metrics: {', '.join(METRICS)}")
    tables = data / "data_resplit" / name
    sample, answer = _rows(tables / "sample_submission.csv"), _rows(data / "answers" / name / "test_answer.csv")
    columns = list(sample[0])
    named = _VALUE.search(script)
    column = named.group(1) if named else columns[-1]
    if metric is None or len(columns) != 2 or column not in columns or column not in answer[0]:
        return None  # several columns, or a metric of its own
    id_column = next(other for other in columns if other != column)
    keys = answer if id_column in answer[0] else sample
    if len(keys) != len(answer):
        raise RecordError(f"{data}: {name} has {len(answer)} answers and {len(sample)} rows in sample_submission.csv")
    target = Target(
        metric=metric,
        id_column=id_column,
        column=column,
        truth={row[id_column]: value[column] for row, value in zip(keys, answer, strict=True)},
        baseline=_number(folder / "save_performance" / "baseline" / name / "result.txt"),
        ceiling=_number(folder / "save_performance" / "GT" / name / "result.txt"),
    )
    files = (pack_file_at(path.name, path.resolve()) for path in sorted(tables.iterdir()) if path.is_file())
    return Task(
        id=f"dsbench/{name}",
        prompt=_text(data / "task" / f"{name}.txt").strip() + _NOTE,
        answers=(*files, pack_target(target)),
        env="data_science",
        source="dsbench",
        split="test",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); expected DSBench's data_modeling folder") from error


def _rows(path: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(_text(path).splitlines()))
    if not rows:
        raise RecordError(f"{path}: no rows")
    return rows


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
