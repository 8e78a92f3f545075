"""Tables of papers with our results: means with intervals, differences, and the papers' numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas.config.run import GAIN
from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.paper_tables import PaperCell, PaperTable
from mcore_mas.reports.tables import markdown_table, read_evaluation
from rollout.base.files import write_text

# Papers print per cents with one decimal, so their numbers are off by up to 0.05 points.
_ROUNDING = 0.0005
_POSITION = ("block", "row", "column", "metric")  # fields of a cell that say where it is in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a table's scores: settings, code and costs of its runs, and deviations from the paper."""

    scale: str
    seeds: Sequence[int]
    commit: str
    costs: Sequence[Mapping[str, str]]  # `run_costs` of each run
    deviations: Sequence[str]  # `known_deviations` of the table


class Evaluations:
    """Scores by task of a table's evaluations, as means over seeds."""

    def __init__(self, files: Mapping[str, Sequence[Path]]) -> None:
        """Read the files of the evaluations, one for each seed, by `experiment/state`."""
        self._scores = {
            key: pd.concat([read_evaluation(path) for path in paths], ignore_index=True)
            for key, paths in files.items()
        }

    def scores(
        self, experiment: str, state: str, dataset: str, our_metric: str
    ) -> dict[str, pd.Series]:
        """Return a series of scores by task for each data source of an evaluation.

        A series of all tasks has the key "all".

        Args:
            experiment: name of the experiment.
            state: name of the evaluation, or GAIN for trained - base, paired by task.
            dataset: a data source; "all" for one series of all tasks; or "average" for a series of
                each data source, whose means the caller averages.
            our_metric: avg, pass or maj, which is the name of the metric without its k.
        """
        if state == GAIN:
            trained = self.scores(experiment, "trained", dataset, our_metric)
            base = self.scores(experiment, "base", dataset, our_metric)
            return _paired_differences(trained, base)

        rows = self._scores[f"{experiment}/{state}"]
        rows = rows[rows["metric"].str.startswith(f"{our_metric}@")]
        if dataset == "average":
            return {
                str(source): _task_means(part) for source, part in rows.groupby("source", sort=True)
            }
        if dataset != "all":
            rows = rows[rows["source"] == dataset]
        return {dataset: _task_means(rows)} if len(rows) else {}

    def answers_per_task(self, experiment: str, state: str) -> int:
        """Return the number of answers to each task, the k of avg@k; for GAIN that of the trained team."""
        if state == GAIN:
            state = "trained"
        return int(self._scores[f"{experiment}/{state}"]["k"].iloc[0])


def _task_means(rows: pd.DataFrame) -> pd.Series:
    """Return the mean score of each task over seeds."""
    means: pd.Series = rows.groupby("task", sort=True)["value"].mean()
    return means


def _paired_differences(
    scores: Mapping[str, pd.Series], baseline: Mapping[str, pd.Series]
) -> dict[str, pd.Series]:
    """Return the differences `scores` - `baseline` of the tasks that have both, by data source.

    A task has no score if all of its trajectories failed.
    """
    differences = {}
    for source, source_scores in scores.items():
        if source not in baseline:
            continue
        difference = (source_scores - baseline[source]).dropna()
        if len(difference):
            differences[source] = difference
    return differences


def make_paper_table(
    table: PaperTable,
    files: Mapping[str, Sequence[Path]],
    provenance: Provenance,
    csv: Path,
    markdown: Path,
) -> None:
    """Write a table as CSV, with a line per cell and difference, and as Markdown in the paper's layout.

    Args:
        table: the paper's table.
        files: files of the evaluations, one for each seed, by `experiment/state`.
        provenance: origin of the scores.
        csv: the CSV file.
        markdown: the Markdown file.

    Raises:
        TableError: an evaluation is missing or damaged.
    """
    evaluations = Evaluations(files)
    cells = [{**line, **_agreement(table, line)} for line in _cell_lines(table, evaluations)]
    differences = [
        {**line, **_agreement(table, line)} for line in _difference_lines(table, evaluations)
    ]
    seed_count = len(next(iter(files.values())))
    frame = pd.DataFrame([*cells, *differences]).assign(
        scale=provenance.scale, commit=provenance.commit, seeds=seed_count
    )
    write_text(csv, str(frame.to_csv(index=False, float_format="%.6f", lineterminator="\n")))
    page = render_page(
        "paper_table.md.jinja",
        table=table,
        provenance=provenance,
        blocks=_by_block(cells),
        differences=_by_block(differences),
        costs=markdown_table(pd.DataFrame(provenance.costs).fillna("")),
    )
    write_text(markdown, page)


def _cell_lines(table: PaperTable, evaluations: Evaluations) -> Iterator[dict[str, Any]]:
    """Yield a line for each cell of a table; scores and published numbers are fractions of 1."""
    for cell in table.cells:
        scores = _cell_scores(evaluations, cell)
        published = cell.published
        if isinstance(published, float) and not table.fraction:
            published /= 100
        answers_per_task = evaluations.answers_per_task(cell.experiment, cell.state)
        yield {
            **_position(cell),
            "experiment": cell.experiment,
            "policy_state": cell.state,
            "dataset": cell.dataset,
            "measured": f"{cell.our_metric}@{answers_per_task}",
            **_mean_with_interval(scores, f"{cell.dataset}/{cell.metric}"),
            "paper_value": published,
        }


def _difference_lines(table: PaperTable, evaluations: Evaluations) -> Iterator[dict[str, Any]]:
    """Yield the differences of each pair of rows or of columns in `table.compare`, in every block.

    The scores of a method and of its baseline are paired by task.
    """
    cells = {tuple(_position(cell).values()): cell for cell in table.cells}
    for method, baseline in table.compare:
        axis = table.compared_axis(method, baseline)
        for cell in table.cells:
            if getattr(cell, axis) != method:
                continue
            position = _position(cell)
            baseline_cell = cells[tuple({**position, axis: baseline}.values())]
            differences = _paired_differences(
                _cell_scores(evaluations, cell), _cell_scores(evaluations, baseline_cell)
            )
            yield {
                **position,
                axis: f"{method} - {baseline}",
                "policy_state": "difference",
                "dataset": cell.dataset,
                **_mean_with_interval(differences, f"{cell.dataset}/{cell.metric}"),
                "paper_value": _published_difference(table, cell, baseline_cell),
            }


def _position(cell: PaperCell) -> dict[str, str]:
    return {name: getattr(cell, name) for name in _POSITION}


def _cell_scores(evaluations: Evaluations, cell: PaperCell) -> dict[str, pd.Series]:
    return evaluations.scores(cell.experiment, cell.state, cell.dataset, cell.our_metric)


def _published_difference(table: PaperTable, cell: PaperCell, baseline: PaperCell) -> float | None:
    """Return the difference of two published numbers as a fraction of 1, None if one is unknown."""
    if not isinstance(cell.published, float) or not isinstance(baseline.published, float):
        return None
    return (cell.published - baseline.published) / (1 if table.fraction else 100)


def _agreement(table: PaperTable, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CSV columns that compare a line with the paper, by name.

    `paper_source` and `grade` are those of the table. `tolerance` is `_ROUNDING` plus the distance
    from our mean to the end of its interval on the side of the published number. `within` is True if
    our mean and the published number differ by at most the tolerance. `tolerance` and `within` are
    None if no task was scored, or no single number is published.
    """
    agreement = {
        "paper_source": table.source,
        "grade": table.grade,
        "tolerance": None,
        "within": None,
    }
    value = line["value"]
    published = line["paper_value"]
    if value is None or not isinstance(published, float):
        return agreement

    distance = published - value
    distance_to_end = line["ci_high"] - value if distance > 0 else value - line["ci_low"]
    tolerance = distance_to_end + _ROUNDING
    return {**agreement, "tolerance": tolerance, "within": abs(distance) <= tolerance}


def _mean_with_interval(scores: Mapping[str, pd.Series], name: str) -> dict[str, Any]:
    """Return the mean of the data sources' means, with its 95 % interval over tasks.

    The interval of the mean M of G independent means m with intervals [l, u] is
    [M - √(Σ(m - l)²) / G, M + √(Σ(u - m)²) / G] (Zou & Donner 2008, equation 5).

    Args:
        scores: scores by task, by data source.
        name: seed of the bootstrap.

    Returns:
        value, ci_low, ci_high (None if no task was scored) and n, the number of tasks.
    """
    if not scores:
        return {"value": None, "ci_low": None, "ci_high": None, "n": 0}

    groups = list(scores.values())
    means = [fmean(group) for group in groups]
    intervals = [mean_interval(group.tolist(), name) for group in groups]
    lower_parts = [mean - low for mean, (low, _) in zip(means, intervals, strict=True)]
    upper_parts = [high - mean for mean, (_, high) in zip(means, intervals, strict=True)]
    value = fmean(means)
    return {
        "value": value,
        "ci_low": value - hypot(*lower_parts) / len(groups),
        "ci_high": value + hypot(*upper_parts) / len(groups),
        "n": sum(len(group) for group in groups),
    }


def _by_block(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the parts of a table in Markdown, one for each block and metric.

    Yields:
        name: block and metric of the paper.
        measured: our metrics, such as "avg@16"; "" for differences.
        tasks: data sources, each with its number of tasks.
        grid: the Markdown table.
    """
    for block, metric in dict.fromkeys((line["block"], line["metric"]) for line in lines):
        block_lines = [line for line in lines if (line["block"], line["metric"]) == (block, metric)]
        measured = dict.fromkeys(line["measured"] for line in block_lines if "measured" in line)
        task_counts = dict.fromkeys((line["dataset"], line["n"]) for line in block_lines)
        yield {
            "name": f"{block}, {metric}",
            "measured": ", ".join(measured),
            "tasks": ", ".join(f"{dataset} {n}" for dataset, n in task_counts),
            "grid": _markdown_by_row_and_column(block_lines),
        }


def _markdown_by_row_and_column(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of lines by their rows and columns."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        row = rows.setdefault(line["row"], {"": line["row"]})
        row[line["column"]] = _format_cell(line)
    return markdown_table(pd.DataFrame(rows.values()).fillna(""))


def _format_cell(line: Mapping[str, Any]) -> str:
    """Return the text of a cell: `ours [interval] (published)`, or `(=published)` if these agree.

    The unit is per cent, and percentage points for a gain or a difference. `_agreement` says when
    the numbers agree.
    """
    sign = "+" if line["policy_state"] in (GAIN, "difference") else ""
    ours = "no task"
    if line["n"]:
        low = 100 * line["ci_low"]
        high = 100 * line["ci_high"]
        ours = f"{100 * line['value']:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"

    published = line["paper_value"]
    if published is None:
        return ours
    if not isinstance(published, float):
        return f"{ours} ({published})"
    agrees = "=" if line["within"] else ""
    return f"{ours} ({agrees}{100 * published:{sign}.1f})"
