"""Generated tables to predict, whose structure, baseline and ceiling are known; the standard library can solve them."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Literal

from rollout.base.seeds import derive_seed
from rollout.environments.data_science import SUBMISSION, pack_file, pack_target
from rollout.environments.games.generator import SPLITS, split_of
from rollout.environments.predictions import METRICS, Target
from rollout.records.trajectory import Task

Kind = Literal["regression", "classification"]
_METRICS: dict[Kind, tuple[str, ...]] = {
    "regression": ("rmse", "mae"),
    "classification": ("accuracy", "f1", "auc"),
}
_COLUMNS = ("length", "width", "age", "dose", "speed", "load")
_LEVELS = ("low", "middle", "high")
_MISSING = 0.05  # of numeric cells, in the tables that agents see
_PROMPT = """Predict the column `{column}` of a table; this is a {kind}.

- `train.csv`: {train_rows} rows with `id`, the features {features}, and `{column}`. Some numbers are missing.
- `test.csv`: {test_rows} rows with the same columns, without `{column}`.
- `sample_submission.csv`: what a submission looks like.

Write `{submission}` with the columns `id` and `{column}`, one row for every row of test.csv{asked}. It is scored by
{metric} on truths that you do not have. Python's standard library is enough; pandas and scikit-learn may be installed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How a target comes from the features: y = b + Σ w x + effect of the level + noise, or whether that is above 0.

    Tables of different worlds have nothing in common that could be learned by heart.
    """

    kind: Kind
    metric: str
    weights: tuple[int, ...]  # one per numeric feature; 0 is a feature without meaning
    intercept: int
    effects: tuple[int, int, int]  # of the levels low, middle, high
    noise: float  # its standard deviation

    @property
    def key(self) -> str:
        """What decides which split owns the world."""
        return f"{self.kind} {self.weights} {self.intercept} {self.effects}"

    def signal(self, features: Sequence[float], level: int) -> float:
        """The target without noise."""
        return self.intercept + self.effects[level] + sum(w * x for w, x in zip(self.weights, features, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    ids: list[int]
    features: list[list[float]]
    levels: list[int]
    signals: list[float]
    targets: list[float]


def generate(
    seed: int,
    sizes: Mapping[str, int],
    *,
    kinds: Sequence[Kind] = ("regression", "classification"),
    features: int = 3,
    train_rows: int = 120,
    test_rows: int = 60,
) -> list[Task]:
    """sizes[split] tables for each split; a world belongs to one split whatever the seed.

    The baseline is the metric of the training rows' mean (median for mae), or of their most frequent label; the ceiling
    is that of the target without noise, which nobody can know better.

    Raises:
        ValueError: an option is out of range, or an unknown split.
    """
    if not kinds or set(kinds) - set(_METRICS):
        raise ValueError(f"tabular: kinds is {list(kinds)}; expected some of {', '.join(_METRICS)}")
    if not 1 <= features <= len(_COLUMNS) or train_rows < 10 or test_rows < 10:
        raise ValueError(f"tabular: expected 1 <= features <= {len(_COLUMNS)} and at least 10 rows of each table")
    if set(sizes) - set(SPLITS):
        raise ValueError(f"tabular: unknown split {min(set(sizes) - set(SPLITS))}; splits: {', '.join(SPLITS)}")
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


def _draw(random: Random, kind: Kind, features: int) -> World:
    weights = [random.choice((-5, -3, -2, 2, 3, 5)) for _ in range(features)]
    if features > 1:
        weights[random.randrange(features)] = 0
    effects = random.sample((-6, -4, 0, 4, 6), 3)
    return World(
        kind=kind,
        metric=random.choice(_METRICS[kind]),
        weights=tuple(weights),
        intercept=random.randint(-4, 4) if kind == "regression" else -effects[0],
        effects=(effects[0], effects[1], effects[2]),
        noise=1.0,
    )


def _sample(random: Random, world: World, count: int, first: int) -> _Rows:
    features = [[round(random.gauss(0.0, 1.5), 2) for _ in world.weights] for _ in range(count)]
    levels = [random.randrange(3) for _ in range(count)]
    signals = [world.signal(row, level) for row, level in zip(features, levels, strict=True)]
    noisy = [signal + random.gauss(0.0, world.noise) for signal in signals]
    targets = [round(y, 2) if world.kind == "regression" else float(y > 0) for y in noisy]
    ids = list(range(first, first + count))
    return _Rows(ids=ids, features=features, levels=levels, signals=signals, targets=targets)


def _task(random: Random, world: World, split: str, train_rows: int, test_rows: int) -> Task:
    train = _sample(random, world, train_rows, 1)
    test = _sample(random, world, test_rows, train_rows + 1)
    while len(set(test.targets)) < 2 or len(set(train.targets)) < 2:
        train, test = _sample(random, world, train_rows, 1), _sample(random, world, test_rows, train_rows + 1)
    column = "y" if world.kind == "regression" else "label"
    truth = [_text(y, world.kind) for y in test.targets]
    score = METRICS[world.metric].score
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
    prompt = _PROMPT.format(
        column=column,
        kind=world.kind,
        metric=world.metric,
        features=", ".join(f"`{name}`" for name in names),
        train_rows=train_rows,
        test_rows=test_rows,
        submission=SUBMISSION,
        asked=": the probability that it is 1" if world.metric == "auc" else "",
    )
    digest = hashlib.blake2b("".join(files).encode(), digest_size=8).hexdigest()
    source = f"tabular_{world.kind}"
    answers = (*files, pack_target(target))
    return Task(id=f"{source}/{digest}", prompt=prompt, answers=answers, env="data_science", source=source, split=split)


def _constant(world: World, targets: Sequence[float]) -> str:
    """The best prediction that looks at no feature."""
    if world.kind == "classification":
        return _text(float(fmean(targets) > 0.5), world.kind)
    return f"{median(targets) if world.metric == 'mae' else fmean(targets):.4f}"


def _best(world: World, signal: float) -> str:
    if world.kind == "classification" and world.metric != "auc":
        return _text(float(signal > 0), world.kind)
    return f"{signal:.4f}"


def _cells(random: Random, world: World, rows: _Rows, *, target: bool) -> list[list[str]]:
    cells = []
    for key, row, level, y in zip(rows.ids, rows.features, rows.levels, rows.targets, strict=True):
        shown = ["" if random.random() < _MISSING else f"{x:.2f}" for x in row]
        cells.append([str(key), *shown, _LEVELS[level], *([_text(y, world.kind)] if target else [])])
    return cells


def _text(value: float, kind: Kind) -> str:
    return f"{value:.2f}" if kind == "regression" else f"{value:.0f}"


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
