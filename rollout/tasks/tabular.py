"""Data science tasks: generated tables with known baseline and best scores, and DSBench's tasks.

The generated ones can be solved with the standard library. DSBench's data modeling tasks (arXiv
2409.07703) are read from its folder, laid out as in its repository and archive:

data.json                               one object a line, with `name`
data/task/NAME.txt                      the description of the task
data/data_resplit/NAME/                 train.csv, test.csv, sample_submission.csv
data/answers/NAME/test_answer.csv       the truths
evaluation/NAME_eval.py                 read, never run: it names the metric and the column
save_performance/baseline/NAME/result.txt    the score of the baseline, optional
save_performance/GT/NAME/result.txt          the best score, optional
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import Field

from retrieval.regular_files import read_regular_text
from rollout.base.yaml_files import read_yaml
from rollout.environments.data_science import SUBMISSION, pack_file, pack_target
from rollout.environments.predictions import Target
from rollout.environments.table_metrics import TABLE_METRICS
from rollout.records.files import RecordError
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.rows import read_rows
from rollout.tasks.splits import content_digest, split_of

TableKind = Literal["regression", "classification"]
_METRICS: dict[TableKind, tuple[str, ...]] = {
    "regression": ("rmse", "mae"),
    "classification": ("accuracy", "f1", "auc"),
}
_COLUMNS = ("length", "width", "age", "dose", "speed", "load")
_LEVELS = ("low", "middle", "high")
_MISSING_SHARE = 0.05  # share of the numeric cells that are empty in the tables that agents see
_TEXTS: Mapping[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    """The relation of a target to its features: y = b + Σ w x + effect of the level + N(0, 1).

    The label of a classification is 1 where y > 0. Weights and effects differ between tables, so
    that they cannot be memorised.

    Attributes:
        weights: one for each numeric feature; a feature of weight 0 has no meaning.
        effects: effects of the levels low, middle and high.
    """

    kind: TableKind
    metric: str
    weights: tuple[int, ...]
    intercept: int
    effects: tuple[int, int, int]

    @property
    def key(self) -> str:
        """Text by which a model is assigned to a split."""
        return f"{self.kind} {self.weights} {self.intercept} {self.effects}"

    @property
    def target_column(self) -> str:
        """Name of the column to predict."""
        return "y" if self.kind == "regression" else "label"

    def signal(self, features: Sequence[float], level: int) -> float:
        """Return y without its noise, for numeric features and the index of a level."""
        weighted = sum(w * x for w, x in zip(self.weights, features, strict=True))
        return self.intercept + self.effects[level] + weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of a table, with the signal that its target comes from."""

    id: int
    features: list[float]
    level: int
    signal: float
    target: float


def tabular_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    kinds: Annotated[Sequence[TableKind], Field(min_length=1)] = ("regression", "classification"),
    features: Annotated[int, Field(ge=1, le=len(_COLUMNS))] = 3,
    train_rows: Annotated[int, Field(ge=10)] = 120,
    test_rows: Annotated[int, Field(ge=10)] = 60,
) -> list[Task]:
    """Generate sizes[split] tables for each split; a table's model is of one split for any seed.

    The baseline is the score of predicting the training rows' mean (for mae the median) or their
    most frequent label. The ceiling is the score of the target without noise.

    Args:
        kinds: kinds of tables, which the tasks have in turn.
        features: number of numeric columns.
        train_rows, test_rows: number of rows of a task's table for training and of that for the test.
    """
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "tabular", split))
        for number in range(size):
            kind = kinds[number % len(kinds)]
            model = _draw_model(random, kind, features)
            while split_of(model.key) != split:
                model = _draw_model(random, kind, features)
            tasks.append(_make_task(random, model, split, train_rows, test_rows))
    return tasks


def _draw_model(random: Random, kind: TableKind, features: int) -> TableModel:
    weights = [random.choice((-5, -3, -2, 2, 3, 5)) for _ in range(features)]
    if features > 1:
        weights[random.randrange(features)] = 0
    effects = random.sample((-6, -4, 0, 4, 6), 3)
    metric = random.choice(_METRICS[kind])
    # With -effects[0], both labels of a classification are equally likely in rows of level low.
    intercept = random.randint(-4, 4) if kind == "regression" else -effects[0]
    return TableModel(
        kind=kind,
        metric=metric,
        weights=tuple(weights),
        intercept=intercept,
        effects=(effects[0], effects[1], effects[2]),
    )


def _draw_rows(random: Random, model: TableModel, count: int, first_id: int) -> list[_Row]:
    features = [[round(random.gauss(0.0, 1.5), 2) for _ in model.weights] for _ in range(count)]
    levels = [random.randrange(len(_LEVELS)) for _ in range(count)]
    rows = []
    for number in range(count):
        signal = model.signal(features[number], levels[number])
        y = signal + random.gauss(0.0, 1.0)
        rows.append(
            _Row(
                id=first_id + number,
                features=features[number],
                level=levels[number],
                signal=signal,
                target=round(y, 2) if model.kind == "regression" else float(y > 0),
            )
        )
    return rows


def _make_task(
    random: Random, model: TableModel, split: str, train_rows: int, test_rows: int
) -> Task:
    train = _draw_rows(random, model, train_rows, 1)
    test = _draw_rows(random, model, test_rows, train_rows + 1)
    while _is_constant(train) or _is_constant(test):
        train = _draw_rows(random, model, train_rows, 1)
        test = _draw_rows(random, model, test_rows, train_rows + 1)

    column = model.target_column
    truth = [_target_cell(row.target, model.kind) for row in test]
    constant = _constant_prediction(model, [row.target for row in train])
    score = TABLE_METRICS[model.metric].score
    target = Target(
        metric=model.metric,
        id_column="id",
        column=column,
        truth={str(row.id): cell for row, cell in zip(test, truth, strict=True)},
        baseline=score(truth, [constant] * test_rows),
        ceiling=score(truth, [_noiseless_prediction(model, row.signal) for row in test]),
    )

    feature_names = [*_COLUMNS[: len(model.weights)], "level"]
    sample_submission = [["id", column], *([str(row.id), constant] for row in test)]
    files = _pack_tables(random, model, feature_names, train, test)
    files.append(pack_file("sample_submission.csv", _csv_text(sample_submission)))

    prompt = _TEXTS["prompt"].format(
        column=column,
        kind=model.kind,
        metric=model.metric,
        features=", ".join(f"`{name}`" for name in feature_names),
        train_rows=train_rows,
        test_rows=test_rows,
        submission=SUBMISSION,
        asked=": the probability that it is 1" if model.metric == "auc" else "",
    )
    source = f"tabular_{model.kind}"
    return Task(
        id=f"{source}/{content_digest(*files)}",
        prompt=prompt,
        answers=(*files, pack_target(target)),
        env="data_science",
        source=source,
        split=split,
    )


def _pack_tables(
    random: Random,
    model: TableModel,
    feature_names: Sequence[str],
    train: Sequence[_Row],
    test: Sequence[_Row],
) -> list[str]:
    """Encode train.csv, and test.csv without the target, as two of a task's `answers`."""
    train_table = [["id", *feature_names, model.target_column]]
    for row in train:
        cells = _feature_cells(random, row)
        train_table.append([str(row.id), *cells, _target_cell(row.target, model.kind)])
    test_table = [["id", *feature_names]]
    for row in test:
        test_table.append([str(row.id), *_feature_cells(random, row)])
    return [
        pack_file("train.csv", _csv_text(train_table)),
        pack_file("test.csv", _csv_text(test_table)),
    ]


def _is_constant(rows: Sequence[_Row]) -> bool:
    return len({row.target for row in rows}) < 2


def _constant_prediction(model: TableModel, targets: Sequence[float]) -> str:
    """Return the best prediction that uses no feature."""
    if model.kind == "classification":
        return _target_cell(float(fmean(targets) > 0.5), model.kind)
    best = median(targets) if model.metric == "mae" else fmean(targets)
    return f"{best:.4f}"


def _noiseless_prediction(model: TableModel, signal: float) -> str:
    if model.kind == "classification" and model.metric != "auc":
        return _target_cell(float(signal > 0), model.kind)
    return f"{signal:.4f}"


def _feature_cells(random: Random, row: _Row) -> list[str]:
    """Return a row's features as cells, of which some numbers are missing."""
    cells = ["" if random.random() < _MISSING_SHARE else f"{x:.2f}" for x in row.features]
    return [*cells, _LEVELS[row.level]]


def _target_cell(value: float, kind: TableKind) -> str:
    return f"{value:.2f}" if kind == "regression" else f"{value:.0f}"


def _csv_text(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# Parts of DSBench's evaluation scripts. The import lines of a script name other metrics too.
_SCRIPT_RESULT = re.compile(r"^\s*performance(?:,\s*\w+)?\s*=(.*)$", re.MULTILINE)
_SCRIPT_COLUMN = re.compile(r"""["']--value["'].*?default\s*=\s*["']([^"']+)["']""", re.DOTALL)
_DSBENCH_NOTE = (
    f"\n\nThe files are in the working folder. Write `{SUBMISSION}` in the form of "
    "sample_submission.csv."
)


def dsbench_tasks(
    seed: int, sizes: Mapping[str, int], *, folder: str, metrics: Mapping[str, str] | None = None
) -> list[Task]:
    """Draw sizes[split] different tasks for each split by `seed`, from those that can be scored.

    Args:
        folder: DSBench's `data_modeling`, with data.zip unpacked in it.
        metrics: metrics by task, in place of those that the tasks' scripts compute.

    Raises:
        RecordError: a file is missing or of another form.
        ValueError: there are too few tasks.
    """
    root = Path(folder)
    index = root / "data.json"
    if not index.is_file():
        raise RecordError(f"{index}: no such file; expected DSBench's data_modeling folder")
    tasks = []
    for row in read_rows(index, ".jsonl"):
        if "name" not in row:
            raise RecordError(f"{index}: a row has no name")
        name = str(row["name"])
        task = _read_dsbench_task(root, name, (metrics or {}).get(name))
        if task is not None:
            tasks.append(task)

    count = sum(sizes.values())
    if count > len(tasks):
        raise ValueError(
            f"dsbench: {count} tasks asked for, but {folder} has {len(tasks)} that can be scored"
        )
    drawn = Random(derive_seed(seed, "dsbench")).sample(tasks, count)
    splits: list[str] = []
    for split, size in sizes.items():
        splits += [split] * size
    return [replace(task, split=split) for task, split in zip(drawn, splits, strict=True)]


def metric_of(script: str) -> str | None:
    """Return the metric that an evaluation script computes last; None if we do not have it."""
    results = _SCRIPT_RESULT.findall(script)
    if not results:
        return None
    for metric, pattern in _TEXTS["metric_signs"].items():
        if re.search(pattern, results[-1]):
            return str(metric)
    return None


def _read_dsbench_task(root: Path, name: str, metric: str | None) -> Task | None:
    """Read a task; None if its script computes a metric that we do not have, or its answers lack columns."""
    data = root / "data"
    tables = data / "data_resplit" / name
    script = _read_text(root / "evaluation" / f"{name}_eval.py")
    metric = metric or _TEXTS["metrics_by_task"].get(name) or metric_of(script)
    if metric is not None and metric not in TABLE_METRICS:
        raise RecordError(
            f"{root}: metric '{metric}' of {name} is not known; metrics: {', '.join(TABLE_METRICS)}"
        )
    sample = list(read_rows(tables / "sample_submission.csv"))
    answers = list(read_rows(data / "answers" / name / "test_answer.csv"))
    if not sample or not answers:
        raise RecordError(f"{data}: {name} has no rows in sample_submission.csv or test_answer.csv")

    id_column, *columns = list(sample[0])
    match = _SCRIPT_COLUMN.search(script)
    named = match.group(1) if match else ""
    if len(sample[0]) == 2 and named == id_column:  # the id is the second column
        columns, id_column = [id_column], columns[0]
    # Scripts of other tasks name a column that the task does not have; they score all columns.
    if named in columns:
        columns = [named]
    if metric is None or not set(columns) <= set(answers[0]):
        return None
    id_rows = answers if id_column in answers[0] else sample
    if len(id_rows) != len(answers):
        raise RecordError(
            f"{data}: {name} has {len(answers)} answers and {len(sample)} rows in "
            "sample_submission.csv"
        )

    truth: dict[str, Any] = {}
    for id_row, answer in zip(id_rows, answers, strict=True):
        cells = [answer[column] for column in columns]
        truth[id_row[id_column]] = cells[0] if len(columns) == 1 else cells
    target = Target(
        metric=metric,
        id_column=id_column,
        column=columns[0] if len(columns) == 1 else "",
        columns=columns if len(columns) > 1 else (),
        truth=truth,
        baseline=_read_score(root / "save_performance" / "baseline" / name / "result.txt"),
        ceiling=_read_score(root / "save_performance" / "GT" / name / "result.txt"),
    )
    files = [
        pack_file(path.name, path.resolve()) for path in sorted(tables.iterdir()) if path.is_file()
    ]
    description = _read_text(data / "task" / f"{name}.txt").strip()
    return Task(
        id=f"dsbench/{name}",
        prompt=description + _DSBENCH_NOTE,
        answers=(*files, pack_target(target)),
        env="data_science",
        source="dsbench",
        split="test",
    )


def _read_text(path: Path) -> str:
    try:
        return read_regular_text(path).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path}: cannot be read ({error}); expected DSBench's data_modeling folder"
        ) from error


def _read_score(path: Path) -> float | None:
    """Return the number in a file; None if there is none."""
    try:
        return float(read_regular_text(path))
    except (OSError, ValueError):
        return None
