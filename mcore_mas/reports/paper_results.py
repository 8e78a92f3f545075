"""Papers' numbers beside ours: a table made here with intervals and differences, and the hyper-parameters behind it."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas import SHIPPED
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import expand_braces
from mcore_mas.config.run import GAIN, RunConfig
from mcore_mas.equations.advantages import ESTIMATORS, TOKEN_LEVEL_ESTIMATORS
from mcore_mas.equations.losses import LOSSES
from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.paper_tables import PaperTable
from mcore_mas.reports.tables import markdown_table, read_evaluation
from rollout.base.files import write_text
from rollout.base.yaml_files import read_yaml
from rollout.config.choice import Choice

_ROUNDING = 0.0005  # papers print a decimal of a per cent


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """What a table was made from besides scores: all that its head and its end say."""

    scale: str
    seeds: Sequence[int]
    commit: str
    costs: Sequence[Mapping[str, str]]  # `run_costs` of each run
    deviations: Sequence[str]  # `known_deviations` of its experiments


class Evaluations:
    """Scores by task of the evaluations that a table is made of; seeds of a task are averaged."""

    def __init__(self, files: Mapping[str, Sequence[Path]]) -> None:
        """`files` are by `experiment/state`, one of each seed."""
        self._scores = {
            key: pd.concat([read_evaluation(path) for path in paths], ignore_index=True)
            for key, paths in files.items()
        }

    def scores(self, experiment: str, state: str, dataset: str, kind: str) -> dict[str, pd.Series]:
        """Scores by task of a data source, of `all` tasks, or for an `average` of each source by itself."""
        if state == GAIN:
            return _paired(
                *(self.scores(experiment, own, dataset, kind) for own in ("trained", "base"))
            )
        found = self._scores[f"{experiment}/{state}"]
        found = found[found["metric"].str.startswith(f"{kind}@")]
        if dataset not in ("all", "average"):
            found = found[found["source"] == dataset]
        parts = found.groupby("source", sort=True) if dataset == "average" else [(dataset, found)]
        return {
            str(name): part.groupby("task", sort=True)["value"].mean()
            for name, part in parts
            if len(part)
        }

    def answers(self, experiment: str, state: str) -> int:
        """k of avg@k."""
        return int(
            self._scores[f"{experiment}/{'trained' if state == GAIN else state}"]["k"].iloc[0]
        )


def _paired(ours: Mapping[str, pd.Series], theirs: Mapping[str, pd.Series]) -> dict[str, pd.Series]:
    """Differences by task of what both have scored: all trajectories of a task or a source may have failed."""
    both = {name: (ours[name] - theirs[name]).dropna() for name in ours if name in theirs}
    return {name: own for name, own in both.items() if len(own)}


def make_paper_table(
    table: PaperTable,
    files: Mapping[str, Sequence[Path]],
    made: MadeFrom,
    csv: Path,
    markdown: Path,
) -> None:
    """Write the table as CSV, a measured cell a line, and as Markdown in the paper's layout.

    `files` are the evaluations by `experiment/state`, one of each seed.

    Raises:
        TableError: an evaluation is missing or not as `mcore_mas.evaluation.evaluate` writes it.
    """
    evaluations = Evaluations(files)
    lines = [line | _agreement(table, line) for line in _lines(table, evaluations)]
    differences = [line | _agreement(table, line) for line in _differences(table, evaluations)]
    repeats = len(next(iter(files.values())))
    frame = pd.DataFrame([*lines, *differences]).assign(
        scale=made.scale, commit=made.commit, seeds=repeats
    )
    write_text(csv, str(frame.to_csv(index=False, float_format="%.6f", lineterminator="\n")))
    page = render_page(
        "paper_table.md.jinja",
        table=table,
        made=made,
        blocks=_by_block(lines),
        differences=_by_block(differences),
        costs=markdown_table(pd.DataFrame(made.costs).fillna("")),
    )
    write_text(markdown, page)


def _lines(table: PaperTable, evaluations: Evaluations) -> Iterator[dict[str, Any]]:
    """Each cell of the table, with the paper's number as a fraction of 1."""
    for cell in table.cells:
        scores = evaluations.scores(cell.experiment, cell.state, cell.dataset, cell.kind)
        published = cell.published
        if isinstance(published, float) and not table.fraction:
            published /= 100
        yield {
            **{name: getattr(cell, name) for name in ("block", "row", "column", "metric")},
            "experiment": cell.experiment,
            "policy_state": cell.state,
            "dataset": cell.dataset,
            "measured": f"{cell.kind}@{evaluations.answers(cell.experiment, cell.state)}",
            **_measured(scores, f"{cell.dataset}/{cell.metric}"),
            "paper_value": published,
        }


def _agreement(table: PaperTable, line: Mapping[str, Any]) -> dict[str, Any]:
    """How far from the paper's number ours may be by the chance of which tasks there are, and whether it is within."""
    said = {"paper_source": table.source, "grade": table.grade}
    if line["value"] is None or not isinstance(line["paper_value"], float):
        return said | {"tolerance": None, "within": None}
    off = line["paper_value"] - line["value"]
    tolerance = line["ci_high"] - line["value"] if off > 0 else line["value"] - line["ci_low"]
    return said | {"tolerance": tolerance + _ROUNDING, "within": abs(off) <= tolerance + _ROUNDING}


def _measured(scores: Mapping[str, pd.Series], name: str) -> dict[str, Any]:
    """Mean of the groups' means with its 95 % interval over tasks; nothing where no task was scored."""
    if not scores:
        return {"value": None, "ci_low": None, "ci_high": None, "n": 0}
    groups = list(scores.values())
    means = [fmean(group) for group in groups]
    intervals = [mean_interval(group.tolist(), name) for group in groups]
    # of G independent means with intervals [l, u]: M - √Σ(m - l)²/G and M + √Σ(u - m)²/G   Zou & Donner 2008, eq. 5
    below = hypot(*(mean - low for mean, (low, _) in zip(means, intervals, strict=True))) / len(
        groups
    )
    above = hypot(*(high - mean for mean, (_, high) in zip(means, intervals, strict=True))) / len(
        groups
    )
    value = fmean(means)
    return {
        "value": value,
        "ci_low": value - below,
        "ci_high": value + above,
        "n": sum(map(len, groups)),
    }


def _differences(table: PaperTable, evaluations: Evaluations) -> Iterator[dict[str, Any]]:
    """Each method minus its baseline, paired by task, in every block and on every data source."""
    axis = "row" if all(name in table.rows for pair in table.compare for name in pair) else "column"
    cells = {(c.block, c.row, c.column, c.metric): c for c in table.cells}
    for method, baseline in table.compare:
        for cell in (cell for cell in table.cells if getattr(cell, axis) == method):
            place = {name: getattr(cell, name) for name in ("block", "row", "column", "metric")}
            other = cells[tuple((place | {axis: baseline}).values())]
            both = (
                evaluations.scores(own.experiment, own.state, own.dataset, own.kind)
                for own in (cell, other)
            )
            scores = _paired(*both)
            published = (cell.published, other.published)
            known = [value for value in published if isinstance(value, float)]
            paper = (
                (known[0] - known[1]) / (1 if table.fraction else 100) if len(known) == 2 else None
            )
            yield {
                **place,
                axis: f"{method} - {baseline}",
                "policy_state": "difference",
                "dataset": cell.dataset,
                **_measured(scores, f"{cell.dataset}/{cell.metric}"),
                "paper_value": paper,
            }


def _by_block(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The grid of each block and metric; which of our metrics it has, and how many tasks of each data source."""
    for block, metric in dict.fromkeys((line["block"], line["metric"]) for line in lines):
        own = [line for line in lines if (line["block"], line["metric"]) == (block, metric)]
        measured = ", ".join(dict.fromkeys(line["measured"] for line in own if "measured" in line))
        counts = dict.fromkeys((line["dataset"], line["n"]) for line in own)
        tasks = ", ".join(f"{dataset} {n}" for dataset, n in counts)
        yield {
            "name": f"{block}, {metric}",
            "measured": measured,
            "tasks": tasks,
            "grid": _grid(own),
        }


def _grid(lines: Sequence[Mapping[str, Any]]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        rows.setdefault(line["row"], {"": line["row"]})[line["column"]] = _shown(line)
    return markdown_table(pd.DataFrame(rows.values()).fillna(""))


def _shown(line: Mapping[str, Any]) -> str:
    """`ours [interval] (paper)`, in per cent or points."""
    sign = "+" if line["policy_state"] in (GAIN, "difference") else ""
    ours = "no task"
    if line["n"]:
        low, high = 100 * line["ci_low"], 100 * line["ci_high"]
        ours = f"{100 * line['value']:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"
    paper = line["paper_value"]
    if paper is None:
        return ours
    agrees = "=" if line["within"] else ""
    return (
        f"{ours} ({agrees}{100 * paper:{sign}.1f})"
        if isinstance(paper, float)
        else f"{ours} ({paper})"
    )


def known_deviations(table: PaperTable) -> list[str]:
    """What is known to differ from the paper, with the experiments that it is of, from the published values."""
    told: dict[str, list[str]] = {}
    besides = {
        name: row["besides"]
        for row in read_published()["rows"]
        for name, _ in expand_braces(row["of"])
    }
    for experiment in table.experiments:
        differs = [str(value) for value in published_values(experiment).values() if value.differs]
        text = "; ".join(filter(None, [besides.get(experiment, ""), *differs]))
        if text:
            told.setdefault(text, []).append(f"`{experiment}`")
    return [f"{', '.join(names)}: {text}" for text, names in told.items()]


UNKNOWN = "unknown"
_TURNS = ("max_turns", "max_loops", "rounds", "max_nodes", "max_programs")  # options of orchestras


def _one(values: Iterable[Any]) -> Any:
    """The value that all have, or the different ones."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


def _at(value: Any, path: Sequence[str]) -> Any:
    """What a path of keys leads to; `*` is every policy or agent, and None what is not there."""
    for place, key in enumerate(path, start=1):
        if key == "*":
            return _one(_at(own, path[place:]) for own in value.values())
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return list(value) if isinstance(value, tuple) else value


def _of_loss(key: str, config: RunConfig) -> Any:
    return config.loss.options.get(
        key, inspect.signature(LOSSES[config.loss.name]).parameters[key].default
    )


def _chosen(choice: Choice | None) -> Any:
    """A choice's name, with its options that are numbers if it has any."""
    if choice is None or choice.name == "none":
        return choice and choice.name
    return [choice.name, *(value for value in choice.options.values() if isinstance(value, float))]


def _of_estimators(names: Collection[str], key: str, config: RunConfig) -> Any:
    """An option of the agents' estimators; None of those whose name is not one of `names`, or that have none."""
    rules = [config.advantage_of(agent) for agent in config.agents]
    parameters = [
        inspect.signature(ESTIMATORS[r.name]).parameters if r.name in names else {} for r in rules
    ]
    options = zip(rules, parameters, strict=True)
    return _one(
        rule.options.get(key, own[key].default) if key in own else None for rule, own in options
    )


# hyper-parameters that are no single key of a config; docs/published.yaml has the others
COMPUTED: Mapping[str, Callable[[RunConfig], Any]] = {
    "estimator": lambda config: _one(config.advantage_of(agent).name for agent in config.agents),
    "group size": lambda config: (
        config.trainer.branching.width if config.trainer.branching else config.trainer.group_size
    ),
    "updates per step": lambda config: (
        f"mini-batches of {config.trainer.minibatch} rows"
        if config.trainer.minibatch
        else config.trainer.updates_per_step
    ),
    "lower clip": partial(_of_loss, "clip_low"),
    "upper clip": partial(_of_loss, "clip_high"),
    "dual clip": partial(_of_loss, "dual_clip"),
    "KL": lambda config: [kl.coef, kl.estimate, kl.where] if (kl := config.loss.kl).coef else 0.0,
    "prompt tokens": lambda config: (
        config.engine.max_length - max(a.max_tokens for a in config.agents.values())
    ),
    "turns": lambda config: next(
        (config.orchestra.options[key] for key in _TURNS if key in config.orchestra.options), None
    ),
    "malformed reply": lambda config: config.reward.penalties.get("invalid", {}).get("coef", 0.0),
    "filter": lambda config: _chosen(config.filter),
    "correction": lambda config: _chosen(config.loss.correction),
    "discount": partial(_of_estimators, TOKEN_LEVEL_ESTIMATORS, "gamma"),
    "lambda": partial(_of_estimators, TOKEN_LEVEL_ESTIMATORS, "lam"),
    "tree weights": lambda config: [
        _of_estimators(("mcts", "mars2"), key, config) for key in ("gamma", "lam")
    ],
    "prompts": lambda config: "ours",  # of every role
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One hyper-parameter of an experiment, in the paper and here."""

    name: str
    ours: Any
    theirs: Any  # UNKNOWN where neither paper nor code gives it
    source: str  # where theirs is read
    reason: str  # why ours is another; "" where none is given

    @property
    def differs(self) -> bool:
        """Whether theirs is known and another."""
        return bool(self.theirs != UNKNOWN and self.ours != self.theirs)

    def __str__(self) -> str:
        return f"{self.name} {_told(self.ours)}, published {_told(self.theirs)}: {self.reason}"


@cache
def read_published() -> dict[str, Any]:
    """docs/published.yaml: `hyperparameters`, `sources`, `families`, `hardware` and `rows`."""
    return dict(read_yaml(SHIPPED / "docs" / "published.yaml"))


@cache
def published_values(experiment: str) -> dict[str, PublishedValue]:
    """The hyper-parameters of an experiment that docs/published.yaml says anything about, by name."""
    theirs: dict[str, tuple[Any, str]] = {}
    reasons: dict[str, str] = {}
    for family in read_published()["families"]:
        if any(fnmatch(experiment, pattern) for pattern in family["of"]):
            theirs |= dict.fromkeys(family.get("unknown", ()), (UNKNOWN, ""))
            theirs |= {
                name: (value, source) for name, (value, source) in family.get("values", {}).items()
            }
            reasons |= family.get("differs", {})
    ours = compared_values(RunConfig.check(resolve([f"experiment={experiment}"]), experiment))
    return {
        name: PublishedValue(
            name=name, ours=ours[name], theirs=value, source=source, reason=reasons.get(name, "")
        )
        for name, (value, source) in theirs.items()
    }


def compared_values(config: RunConfig) -> dict[str, Any]:
    """Every hyper-parameter of a run that is compared with a paper's, by name."""
    keys = {name: key.split(".") for name, key in read_published()["hyperparameters"].items()}
    return {name: _at(config, key) for name, key in keys.items()} | {
        name: own(config) for name, own in COMPUTED.items()
    }


def _told(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
