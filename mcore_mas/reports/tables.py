"""Tables of scores with confidence intervals: before training, after it, and the gain.

`make_table` writes the table of a suite, and `result_rows` reads a row per experiment from it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas.config.run import GAIN, STATES
from mcore_mas.equations.statistics import score_interval
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.paper_tables import TableError
from rollout.base.files import write_text
from rollout.base.json_files import read_json, unsealed

_NOTE = (
    "Scores in %; avg@k is the mean of k trajectories of a task, pass@k the best of them, maj@k their "
    "most frequent answer. A trajectory whose prompt was too long counts as wrong; one that failed is "
    "left out. Brackets hold 95 % intervals over tasks; trained-base and similar rows are paired "
    "differences in points."
)
# Columns of `make_table` and `result_rows` that hold numbers, which are aligned to the right.
_NUMBER_COLUMNS = {"score", "95 % interval", "tasks", "replies", "seeds", "base", "trained", "gain"}

# Columns of a table in CSV that `result_rows` reads.
_RESULT_COLUMNS = (
    "experiment",
    "policy_state",
    "dataset",
    "metric",
    "value",
    "ci_low",
    "ci_high",
    "n",
    "seed_count",
)


def make_table(
    evaluations: Sequence[Path], experiments: Mapping[str, str], outputs: Sequence[Path]
) -> None:
    """Write the table of a suite's evaluations.

    The CSV has a measured number per line, as a fraction of 1. The Markdown and the HTML table have
    scores in per cent.

    Args:
        evaluations: files of the evaluations.
        experiments: experiment of each run.
        outputs: files to write: .csv, .md or .html.

    Raises:
        TableError: an evaluation file is missing or damaged.
    """
    scores = pd.concat([read_evaluation(path) for path in evaluations], ignore_index=True)
    scores["experiment"] = scores["run"].map(experiments)
    table = pd.DataFrame(_table_rows(scores))
    readable = pd.DataFrame(_readable_cells(row) for row in table.to_dict("records"))
    texts = {
        ".csv": table.to_csv(index=False, float_format="%.6f", lineterminator="\n"),
        ".md": f"{markdown_table(readable)}\n\n{_NOTE}\n",
        ".html": render_page(
            "table.html.jinja",
            rows=readable.to_dict("records"),
            numbers=_NUMBER_COLUMNS,
            note=_NOTE,
        ),
    }
    for path in outputs:
        write_text(path, texts[path.suffix])


def read_evaluation(path: Path) -> pd.DataFrame:
    """Read an evaluation as a table with a row per task and metric.

    The columns are task, source, metric and value, and those of the evaluation, which are the same
    in every row: run, policy_state, k, replies, overlong, cut and failed (numbers of failed replies
    by reason).

    Raises:
        TableError: the file is missing or damaged, or no task was scored.
    """
    try:
        content = unsealed(read_json(path))
        evaluation = {"run": content["run"], "policy_state": content["state"]}
        for name in ("k", "replies", "overlong", "cut", "failed"):
            evaluation[name] = content[name]

        rows = []
        for task in content["tasks"]:
            for metric, value in task["metrics"].items():
                score = {"metric": metric, "value": float(value)}
                rows.append(
                    {**evaluation, "task": task["task_id"], "source": task["source"], **score}
                )
        if not rows:
            raise ValueError("no task was scored")
        return pd.DataFrame(rows)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise TableError(
            f"{path}: not a finished evaluation ({reason}); delete it and run `snakemake` again"
        ) from error


def _table_rows(scores: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table in CSV, by experiment, data source, metric and policy state."""
    for experiment, rows in scores.groupby("experiment", sort=False):
        sources = sorted(rows["source"].unique())
        datasets = ["all", *sources] if len(sources) > 1 else sources
        for dataset, metric in product(datasets, rows["metric"].unique()):
            is_of_dataset = rows["source"].eq(dataset) | (dataset == "all")
            part = rows[(rows["metric"] == metric) & is_of_dataset]
            for state, task_scores in _scores_by_state(part, rows).items():
                # The runs of a difference are those of its first state.
                runs = rows[rows["policy_state"] == state.partition("-")[0]].drop_duplicates("run")
                lowest = -1.0 if _is_difference(state) else 0.0
                low, high = score_interval(
                    task_scores.tolist(), f"{dataset}/{metric}", lowest=lowest
                )
                # Replies are counted per evaluation. If there are several data sources, only the rows
                # of all sources ("all") have the counts.
                counts = _reply_counts(runs)
                if dataset != "all" and len(sources) > 1:
                    counts = dict.fromkeys(counts, "")
                yield {
                    "experiment": experiment,
                    "policy_state": state,  # an evaluation, or a difference such as trained-base
                    "dataset": dataset,  # a data source, or "all" of them
                    "metric": metric,  # avg@k, pass@k or maj@k
                    "k": int(runs["k"].iloc[0]),  # replies to a task
                    "value": fmean(task_scores),
                    "ci_low": low,
                    "ci_high": high,
                    "n": len(task_scores),  # number of tasks
                    "seed_count": len(runs),  # number of runs that differ only in their seed
                    **counts,
                }


def _scores_by_state(part: pd.DataFrame, experiment_rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the scores by task of each policy state, and of the differences between states.

    Args:
        part: rows of one metric and one data source.
        experiment_rows: all rows of the experiment, which decide the order of states.
    """
    # Evaluations in which other models play.
    cross_play_states = [
        state for state in experiment_rows["policy_state"].unique() if state not in STATES
    ]
    scores: dict[str, pd.Series] = {}
    for state in (*STATES, *cross_play_states):
        rows = part[part["policy_state"] == state]
        if len(rows):
            # A task that several seeds evaluate counts once.
            scores[state] = rows.groupby("task", sort=False)["value"].mean()

    pairs = [("trained", "base"), *((state, "trained") for state in cross_play_states)]
    for state, baseline in pairs:
        if state not in scores or baseline not in scores:
            continue
        difference = (scores[state] - scores[baseline]).dropna().sort_index()
        # A task whose replies all failed has no score. If the states have no scored task in common,
        # there is no difference.
        if len(difference):
            scores[f"{state}-{baseline}"] = difference
    return scores


def _is_difference(state: str) -> bool:
    """Return True for a difference such as trained-base; names of evaluations have no hyphen."""
    return "-" in state


def _reply_counts(runs: pd.DataFrame) -> dict[str, Any]:
    """Return the counts of the replies of all seeds.

    A reply is the answer of a trajectory. It is "overlong" if a prompt left no room for an agent's
    reply; it counts as wrong. It is "cut" if a part of a prompt was left out; it is scored as usual. It
    has "failed" if an error ended the trajectory before its answer; it is left out of the scores.
    """
    failures: Counter[str] = Counter()
    for failures_of_run in runs["failed"]:
        failures.update(failures_of_run)
    return {
        "replies": int(runs["replies"].sum()),
        "overlong_replies": int(runs["overlong"].sum()),
        "cut_replies": int(runs["cut"].sum()),
        "failed_replies": failures.total(),
        "failures": ", ".join(f"{count} {error}" for error, count in sorted(failures.items())),
    }


def _readable_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row as text, with scores in per cent, and a sign before differences."""
    sign = "+" if _is_difference(row["policy_state"]) else ""
    low = 100 * row["ci_low"]
    high = 100 * row["ci_high"]
    return {
        "experiment": row["experiment"],
        "policy": row["policy_state"],
        "data": row["dataset"],
        "metric": row["metric"],
        "score": f"{100 * row['value']:{sign}.1f}",
        "95 % interval": f"[{low:{sign}.1f}, {high:{sign}.1f}]",
        "tasks": str(row["n"]),
        "replies": _describe_replies(row),
        "seeds": str(row["seed_count"]),
    }


def _describe_replies(row: Mapping[str, Any]) -> str:
    """Describe the replies of a row, such as "20 (1 overlong; 2 failed: 2 TimeoutError)"."""
    notes = []
    for kind in ("overlong", "cut"):
        count = row[f"{kind}_replies"]
        if count:
            notes.append(f"{count} {kind}")
    if row["failed_replies"]:
        notes.append(f"{row['failed_replies']} failed: {row['failures']}")
    if not notes:
        return str(row["replies"])
    return f"{row['replies']} ({'; '.join(notes)})"


def markdown_table(table: pd.DataFrame) -> str:
    """Return a Markdown table of text cells, with the columns of `_NUMBER_COLUMNS` aligned to the right."""
    alignments = ["right" if name in _NUMBER_COLUMNS else "left" for name in table.columns]
    cells = table.map(lambda cell: cell.replace("|", "/"))  # "|" would end the cell
    return str(cells.to_markdown(index=False, disable_numparse=True, colalign=alignments))


def result_rows(table: Path) -> Iterator[dict[str, str]]:
    """Yield a row for each experiment of a table in CSV: its avg@k before and after training, and the gain.

    The scores are over all data sources. The interval is that of the gain.

    Raises:
        TableError: the table is not as `make_table` writes it.
    """
    average = _read_averages(table)
    for experiment, rows in average.groupby("experiment", sort=False):
        # An experiment with one data source has no rows of "all".
        over_all = rows[rows["dataset"] == "all"] if "all" in set(rows["dataset"]) else rows
        by_state = {row["policy_state"]: row for row in over_all.to_dict("records")}
        missing = [state for state in (*STATES, GAIN) if state not in by_state]
        if missing:
            raise TableError(
                f"{table}, experiment {experiment}: no avg@k of {', '.join(missing)}; evaluate "
                "both policy states, then make the table"
            )
        base, trained, gain = (by_state[state] for state in (*STATES, GAIN))
        try:
            low = 100 * float(gain["ci_low"])
            high = 100 * float(gain["ci_high"])
            cells = {
                "metric": gain["metric"],
                "base": f"{100 * float(base['value']):.1f}",
                "trained": f"{100 * float(trained['value']):.1f}",
                "gain": f"{100 * float(gain['value']):+.1f}",
                "95 % interval": f"[{low:+.1f}, {high:+.1f}]",
                "tasks": str(int(gain["n"])),
                "seeds": str(int(gain["seed_count"])),
            }
        except ValueError as error:
            raise TableError(
                f"{table}, experiment {experiment}: not a number ({error}); make the table again"
            ) from error
        yield {"experiment": str(experiment), **cells}


def _read_averages(table: Path) -> pd.DataFrame:
    """Return the rows of avg@k of a table in CSV, as text."""
    if not table.is_file():
        raise TableError(
            f"{table}: no such file; expected a table of scores (run `snakemake {table}`)"
        )
    scores = pd.read_csv(table, dtype=str, keep_default_na=False)
    missing = [name for name in _RESULT_COLUMNS if name not in scores]
    if missing:
        raise TableError(
            f"{table}: no column {', '.join(missing)}; expected {', '.join(_RESULT_COLUMNS)}"
        )
    average = scores[scores["metric"].str.startswith("avg@")]
    if average.empty:
        raise TableError(f"{table}: no row of avg@k; make the table again")
    return average


def headline_rows(table: Path) -> list[dict[str, str]]:
    """Return the rows that Snakemake's report begins with: `result_rows`, or [] if it refuses the table."""
    try:
        return list(result_rows(table))
    except TableError:
        return []
