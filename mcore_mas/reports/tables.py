"""One table of every experiment's scores: before training, after training, and what training added."""

from __future__ import annotations

import csv
import html
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mcore_mas.equations.statistics import bootstrap_interval
from rollout.base.files import write_text

STATES = ("base", "trained")
GAIN = "trained-base"  # paired by task
METRICS: dict[str, Callable[[Sequence[float]], float]] = {"avg": fmean, "pass": max}  # [k] scores of a task -> one
_NOTE = (
    "Scores in %; avg@k is the mean of k answers to a task and pass@k the best of them. Brackets hold 95 % bootstrap "
    "intervals over tasks; trained-base is the paired difference in points."
)


class TableError(ValueError):
    """An evaluation cannot be tabulated: says which file, what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number; scores are fractions of 1."""

    experiment: str
    policy_state: str  # base | trained | trained-base
    dataset: str  # data source, or "all" of them
    metric: str  # avg@k | pass@k
    k: int  # answers per task
    value: float
    ci_low: float
    ci_high: float
    n: int  # tasks
    seed_count: int  # runs that differ only in their seed, averaged task by task
    paper_value: float | None = None
    paper_source: str = ""
    failed_tasks: int = 0  # left out because a trajectory failed: unknown, not wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    run: str
    state: str
    k: int
    failed: int
    scores: Mapping[str, Sequence[float]]  # task id -> [k]
    sources: Mapping[str, str]  # task id -> data source


def make_table(
    evaluations: Sequence[Path],
    experiments: Mapping[str, str],
    published: Sequence[Mapping[str, Any]],
    outputs: Sequence[Path],
) -> None:
    """Write the table of `evaluations` as each of `outputs`: .csv, .md or .html by suffix.

    Args:
        experiments: the experiment of each run.
        published: numbers to print beside ours, by experiment, policy_state, dataset and metric.

    Raises:
        TableError: an evaluation file is missing or not as `mcore_mas.training.evaluate` writes it.
    """
    rows = tabulate([_read(path) for path in evaluations], experiments)
    rows = [_beside(row, published) for row in rows]
    renderers = {".csv": to_csv, ".md": to_markdown, ".html": to_html}
    for path in outputs:
        write_text(path, renderers[path.suffix](rows))


def tabulate(evaluations: Sequence[_Evaluation], experiments: Mapping[str, str]) -> list[Row]:
    """Rows by experiment, data source, metric and policy state, in the order in which experiments first appear."""
    by_experiment: dict[str, dict[str, list[_Evaluation]]] = defaultdict(lambda: defaultdict(list))
    for evaluation in evaluations:
        by_experiment[experiments[evaluation.run]][evaluation.state].append(evaluation)
    return [row for name, states in by_experiment.items() for row in _experiment_rows(name, states)]


def _experiment_rows(experiment: str, states: Mapping[str, list[_Evaluation]]) -> list[Row]:
    sources = sorted({source for runs in states.values() for run in runs for source in run.sources.values()})
    rows = []
    for dataset in ["all", *sources] if len(sources) > 1 else sources:
        for metric, of_task in METRICS.items():
            columns = {state: _by_task(states[state], dataset, of_task) for state in STATES if state in states}
            if len(columns) == len(STATES):
                both = columns["trained"].keys() & columns["base"].keys()
                columns[GAIN] = {task: columns["trained"][task] - columns["base"][task] for task in sorted(both)}
            for state, by_task in columns.items():
                runs = states["trained" if state == GAIN else state]
                name = f"{metric}@{runs[0].k}"
                low, high = bootstrap_interval(list(by_task.values()), f"{dataset}/{name}")
                rows.append(
                    Row(
                        experiment=experiment,
                        policy_state=state,
                        dataset=dataset,
                        metric=name,
                        k=runs[0].k,
                        value=fmean(by_task.values()),
                        ci_low=low,
                        ci_high=high,
                        n=len(by_task),
                        seed_count=len(runs),
                        failed_tasks=sum(run.failed for run in runs),
                    )
                )
    return rows


def _by_task(
    runs: Sequence[_Evaluation], dataset: str, of_task: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """The metric of each task, averaged over the runs (seeds) that have it; two seeds of a task are one vote."""
    seeds: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for task, scores in run.scores.items():
            if dataset in ("all", run.sources[task]):
                seeds[task].append(of_task(scores))
    return {task: fmean(values) for task, values in seeds.items()}


def _read(path: Path) -> _Evaluation:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tasks = content["tasks"]
        if not tasks:
            raise ValueError("no task was scored")
        return _Evaluation(
            run=content["run"],
            state=content["state"],
            k=content["k"],
            failed=content.get("failed_tasks", 0),
            scores={task["task_id"]: task["scores"] for task in tasks},
            sources={task["task_id"]: task["source"] for task in tasks},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise TableError(
            f"{path}: not a finished evaluation ({reason}); delete it and run `snakemake` again"
        ) from error


def _beside(row: Row, published: Sequence[Mapping[str, Any]]) -> Row:
    for number in published:
        if all(getattr(row, key) == number[key] for key in ("experiment", "policy_state", "dataset", "metric")):
            return replace(row, paper_value=number["value"], paper_source=number["source"])
    return row


def to_csv(rows: Sequence[Row]) -> str:
    """Every field of every row; fractions with six decimals."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {key: "" if value is None else value for key, value in asdict(row).items()}
        writer.writerow({key: f"{value:.6f}" if isinstance(value, float) else value for key, value in values.items()})
    return out.getvalue()


_HEAD = ("experiment", "policy", "data", "metric", "score", "95 % interval", "tasks", "seeds", "paper")


def _cells(row: Row) -> tuple[str, ...]:
    sign = "+" if row.policy_state == GAIN else ""
    paper = "" if row.paper_value is None else f"{100 * row.paper_value:.1f} ({row.paper_source})"
    tasks = f"{row.n} ({row.failed_tasks} failed)" if row.failed_tasks else str(row.n)
    return (
        row.experiment,
        row.policy_state,
        row.dataset,
        row.metric,
        f"{100 * row.value:{sign}.1f}",
        f"[{100 * row.ci_low:{sign}.1f}, {100 * row.ci_high:{sign}.1f}]",
        tasks,
        str(row.seed_count),
        paper,
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """A table for people, in percent; differences carry their sign."""
    head = [f"| {' | '.join(_HEAD)} |", "|---|---|---|---|---:|---:|---:|---:|---|"]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |" for row in rows]
    return "\n".join([*head, *lines, "", _NOTE, ""])


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1a1a1a;background:#fff}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:left}"
    "td:nth-child(n+5):nth-child(-n+8),th:nth-child(n+5):nth-child(-n+8)"
    "{text-align:right;font-variant-numeric:tabular-nums}"
    "tr.gain td{font-weight:600;border-bottom:2px solid #666}"
)


def to_html(rows: Sequence[Row]) -> str:
    """The table for people as one self-contained page."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _HEAD)
    body = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row))
        body.append(f'<tr class="gain">{cells}</tr>' if row.policy_state == GAIN else f"<tr>{cells}</tr>")
    title = f'<head><meta charset="utf-8"><title>scores</title><style>{_STYLE}</style></head>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<!doctype html><html lang="en">{title}<body>{table}<p>{html.escape(_NOTE)}</p></body></html>\n'
