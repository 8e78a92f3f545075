"""Data science tasks (tables to predict): generated ones, whose baseline and ceiling are known, and DSBench's.

The generated ones can be solved by the standard library. DSBench's data-modeling tasks (arXiv 2409.07703) are read from
its folder, as its repository and archive lay it out:

data.json                               one object a line, with `name`
data/task/NAME.txt                      the task as it is described
data/data_resplit/NAME/                 train.csv, test.csv, sample_submission.csv
data/answers/NAME/test_answer.csv       the truths
evaluation/NAME_eval.py                 read, never run: which metric, which column
save_performance/{baseline,GT}/NAME/result.txt    the ends of the performance gap, where they are there
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

from rollout.base.files import read_yaml
from rollout.environments.data_science import SUBMISSION, pack_file, pack_target
from rollout.environments.predictions import TABLE_METRICS, Target
from rollout.records.files import RecordError
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.files import read_rows
from rollout.tasks.splits import digest, split_of

TableKind = Literal["regression", "classification"]
_METRICS: dict[TableKind, tuple[str, ...]] = {
    "regression": ("rmse", "mae"),
    "classification": ("accuracy", "f1", "auc"),
}
_COLUMNS = ("length", "width", "age", "dose", "speed", "load")
_LEVELS = ("low", "middle", "high")
_MISSING = 0.05  # of numeric cells, in the tables that agents see
_WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    """How a target comes from the features: y = b + Σ w x + effect of the level + N(0, 1), or whether that is above 0.

    Tables of different worlds have nothing in common that could be learned by heart.
    """

    kind: TableKind
    metric: str
    weights: tuple[int, ...]  # one per numeric feature; 0 is a feature without meaning
    intercept: int
    effects: tuple[int, int, int]  # of the levels low, middle, high

    @property
    def key(self) -> str:
        """What decides which split owns the world."""
        return f"{self.kind} {self.weights} {self.intercept} {self.effects}"

    def signal(self, features: Sequence[float], level: int) -> float:
        """The target without noise."""
        return (
            self.intercept
            + self.effects[level]
            + sum(w * x for w, x in zip(self.weights, features, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    ids: list[int]
    features: list[list[float]]
    levels: list[int]
    signals: list[float]
    targets: list[float]


def tabular_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    kinds: Annotated[Sequence[TableKind], Field(min_length=1)] = ("regression", "classification"),
    features: Annotated[int, Field(ge=1, le=len(_COLUMNS))] = 3,
    train_rows: Annotated[int, Field(ge=10)] = 120,
    test_rows: Annotated[int, Field(ge=10)] = 60,
) -> list[Task]:
    """sizes[split] tables for each split; a world belongs to one split whatever the seed.

    The baseline is the metric of the training rows' mean (median for mae), or of their most frequent label; the ceiling
    is that of the target without noise, which nobody can know better.

    Args:
        kinds: kinds of tables, in turn.
        features: columns that the target may depend on.
        train_rows, test_rows: rows of a table.
    """
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "tabular", split))
        for number in range(size):
            kind = kinds[number % len(kinds)]
            world = _draw(random, kind, features)
            while split_of(world.key) != split:
                world = _draw(random, kind, features)
            tasks.append(_task(random, world, split, train_rows, test_rows))
    return tasks


def _draw(random: Random, kind: TableKind, features: int) -> TableModel:
    weights = [random.choice((-5, -3, -2, 2, 3, 5)) for _ in range(features)]
    if features > 1:
        weights[random.randrange(features)] = 0
    effects = random.sample((-6, -4, 0, 4, 6), 3)
    return TableModel(
        kind=kind,
        metric=random.choice(_METRICS[kind]),
        weights=tuple(weights),
        intercept=random.randint(-4, 4) if kind == "regression" else -effects[0],
        effects=(effects[0], effects[1], effects[2]),
    )


def _sample(random: Random, world: TableModel, count: int, first: int) -> _Rows:
    features = [[round(random.gauss(0.0, 1.5), 2) for _ in world.weights] for _ in range(count)]
    levels = [random.randrange(3) for _ in range(count)]
    signals = [world.signal(row, level) for row, level in zip(features, levels, strict=True)]
    noisy = [signal + random.gauss(0.0, 1.0) for signal in signals]
    targets = [round(y, 2) if world.kind == "regression" else float(y > 0) for y in noisy]
    ids = list(range(first, first + count))
    return _Rows(ids=ids, features=features, levels=levels, signals=signals, targets=targets)


def _task(random: Random, world: TableModel, split: str, train_rows: int, test_rows: int) -> Task:
    train = _sample(random, world, train_rows, 1)
    test = _sample(random, world, test_rows, train_rows + 1)
    while len(set(test.targets)) < 2 or len(set(train.targets)) < 2:
        train, test = (
            _sample(random, world, train_rows, 1),
            _sample(random, world, test_rows, train_rows + 1),
        )
    column = "y" if world.kind == "regression" else "label"
    truth = [_text(y, world.kind) for y in test.targets]
    score = TABLE_METRICS[world.metric].score
    target = Target(
        metric=world.metric,
        id_column="id",
        column=column,
        truth=dict(zip(map(str, test.ids), truth, strict=True)),
        baseline=score(truth, [_constant(world, train.targets)] * test_rows),
        ceiling=score(truth, [_best(world, signal) for signal in test.signals]),
    )
    names = [*_COLUMNS[: len(world.weights)], "level"]
    header, constant = ["id", *names], _constant(world, train.targets)
    tables = {
        "train.csv": [[*header, column], *_cells(random, world, train, target=True)],
        "test.csv": [header, *_cells(random, world, test, target=False)],
        "sample_submission.csv": [["id", column], *([str(key), constant] for key in test.ids)],
    }
    files = [pack_file(name, _csv(rows)) for name, rows in tables.items()]
    prompt = _WORDS["prompt"].format(
        column=column,
        kind=world.kind,
        metric=world.metric,
        features=", ".join(f"`{name}`" for name in names),
        train_rows=train_rows,
        test_rows=test_rows,
        submission=SUBMISSION,
        asked=": the probability that it is 1" if world.metric == "auc" else "",
    )
    source = f"tabular_{world.kind}"
    answers = (*files, pack_target(target))
    return Task(
        id=f"{source}/{digest(*files)}",
        prompt=prompt,
        answers=answers,
        env="data_science",
        source=source,
        split=split,
    )


def _constant(world: TableModel, targets: Sequence[float]) -> str:
    """The best prediction that looks at no feature."""
    if world.kind == "classification":
        return _text(float(fmean(targets) > 0.5), world.kind)
    return f"{median(targets) if world.metric == 'mae' else fmean(targets):.4f}"


def _best(world: TableModel, signal: float) -> str:
    if world.kind == "classification" and world.metric != "auc":
        return _text(float(signal > 0), world.kind)
    return f"{signal:.4f}"


def _cells(random: Random, world: TableModel, rows: _Rows, *, target: bool) -> list[list[str]]:
    cells = []
    for key, row, level, y in zip(rows.ids, rows.features, rows.levels, rows.targets, strict=True):
        shown = ["" if random.random() < _MISSING else f"{x:.2f}" for x in row]
        cells.append(
            [str(key), *shown, _LEVELS[level], *([_text(y, world.kind)] if target else [])]
        )
    return cells


def _text(value: float, kind: TableKind) -> str:
    return f"{value:.2f}" if kind == "regression" else f"{value:.0f}"


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


_SCRIPT_RESULT = re.compile(r"^\s*performance\s*=(.*)$", re.MULTILINE)  # imports name others too
_SCRIPT_COLUMN = re.compile(r"""["']--value["'].*?default\s*=\s*["']([^"']+)["']""", re.DOTALL)
_DSBENCH_NOTE = f"\n\nThe files are in the working folder. Write `{SUBMISSION}` in the form of sample_submission.csv."


def dsbench_tasks(
    seed: int, sizes: Mapping[str, int], *, folder: str, metrics: Mapping[str, str] | None = None
) -> list[Task]:
    """sizes[split] tasks for each split, drawn without replacement from those that can be scored, by `seed`.

    Args:
        folder: DSBench's `data_modeling`, with data.zip unpacked in it.
        metrics: names in TABLE_METRICS by task, for those whose script does not say; others that do not are left out.

    Raises:
        RecordError: a file is missing or of another form.
    """
    index = Path(folder) / "data.json"
    if not index.is_file():
        raise RecordError(f"{index}: no such file; expected DSBench's data_modeling folder")
    rows = list(read_rows(index, ".jsonl"))
    if not all("name" in row for row in rows):
        raise RecordError(f"{index}: a row has no name")
    found = (
        _dsbench_task(Path(folder), str(row["name"]), (metrics or {}).get(str(row["name"])))
        for row in rows
    )
    tasks = [task for task in found if task is not None]
    wanted = sum(sizes.values())
    if wanted > len(tasks):
        raise ValueError(
            f"dsbench: {wanted} tasks asked for, but {folder} has {len(tasks)} that can be scored"
        )
    drawn = iter(Random(derive_seed(seed, "dsbench")).sample(tasks, wanted))
    splits = [split for split, size in sizes.items() for _ in range(size)]
    return [replace(task, split=split) for task, split in zip(drawn, splits, strict=True)]


def metric_of(script: str) -> str | None:
    """The metric that an evaluation script computes last; None when it is none of ours."""
    results = _SCRIPT_RESULT.findall(script)
    signs = _WORDS["metric_signs"].items()
    return next(
        (metric for metric, sign in signs if results and re.search(sign, results[-1])), None
    )


def _dsbench_task(folder: Path, name: str, metric: str | None) -> Task | None:
    data = folder / "data"
    script = _file_text(folder / "evaluation" / f"{name}_eval.py")
    metric = metric or metric_of(script)
    if metric is not None and metric not in TABLE_METRICS:
        raise RecordError(
            f"{folder}: metric '{metric}' of {name} is not known; metrics: {', '.join(TABLE_METRICS)}"
        )
    tables = data / "data_resplit" / name
    paths = (tables / "sample_submission.csv", data / "answers" / name / "test_answer.csv")
    sample, answer = (list(read_rows(path)) for path in paths)
    if not sample or not answer:
        raise RecordError(
            f"{data}: {name} has no rows in {' or '.join(path.name for path in paths)}"
        )
    columns = list(sample[0])
    named = _SCRIPT_COLUMN.search(script)
    column = named.group(1) if named else columns[-1]
    if metric is None or len(columns) != 2 or column not in columns or column not in answer[0]:
        return None  # several columns, or a metric of its own
    id_column = next(other for other in columns if other != column)
    keys = answer if id_column in answer[0] else sample
    if len(keys) != len(answer):
        raise RecordError(
            f"{data}: {name} has {len(answer)} answers and {len(sample)} rows in sample_submission.csv"
        )
    target = Target(
        metric=metric,
        id_column=id_column,
        column=column,
        truth={row[id_column]: value[column] for row, value in zip(keys, answer, strict=True)},
        baseline=_number(folder / "save_performance" / "baseline" / name / "result.txt"),
        ceiling=_number(folder / "save_performance" / "GT" / name / "result.txt"),
    )
    files = (
        pack_file(path.name, path.resolve()) for path in sorted(tables.iterdir()) if path.is_file()
    )
    prompt = _file_text(data / "task" / f"{name}.txt").strip() + _DSBENCH_NOTE
    answers, source = (*files, pack_target(target)), "dsbench"
    return Task(
        id=f"{source}/{name}",
        prompt=prompt,
        answers=answers,
        env="data_science",
        source=source,
        split="test",
    )


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{path}: cannot be read ({error}); expected DSBench's data_modeling folder"
        ) from error


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
