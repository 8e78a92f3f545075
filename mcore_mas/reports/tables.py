"""Tables of scores with confidence intervals: before training, after it, and the gain."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas.config.run import GAIN, STATES
from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.paper_tables import TableError
from rollout.base.files import write_text
from rollout.base.json_files import unsealed

_NOTE = (
    "Scores in %; avg@k is the mean of k replies to a task, pass@k the best of them, maj@k their most frequent answer. "
    "A reply whose prompt was too long counts as wrong, one that failed is left out. Brackets hold 95 % "
    "intervals over tasks; trained-base and the like are paired differences in points."
)
_NUMBERS = {
    "score",
    "95 % interval",
    "tasks",
    "replies",
    "seeds",
    "base",
    "trained",
    "gain",
}  # set to the right


def make_table(
    evaluations: Sequence[Path], experiments: Mapping[str, str], outputs: Sequence[Path]
) -> None:
    """Write the table of `evaluations` as each of `outputs`: .csv, .md or .html by suffix.

    `experiments` has the experiment of each run.

    Raises:
        TableError: an evaluation file is missing or not as `mcore_mas.evaluation.evaluate` writes it.
    """
    scores = pd.concat([read_evaluation(path) for path in evaluations], ignore_index=True)
    scores["experiment"] = scores["run"].map(experiments)
    table = pd.DataFrame(
        _measured(scores)
    )  # of the CSV, one measured number a line; scores are fractions of 1
    readable = pd.DataFrame(
        _cells(row) for row in table.to_dict("records")
    )  # text, scores in per cent
    texts = {
        ".csv": table.to_csv(index=False, float_format="%.6f", lineterminator="\n"),
        ".md": f"{markdown_table(readable)}\n\n{_NOTE}\n",
        ".html": render_page(
            "table.html.jinja", rows=readable.to_dict("records"), numbers=_NUMBERS, note=_NOTE
        ),
    }
    for path in outputs:
        write_text(path, texts[path.suffix])


def read_evaluation(path: Path) -> pd.DataFrame:
    """A line per task and metric: run, policy_state, k, counts of replies, task, source, metric, value."""
    try:
        content = unsealed(json.loads(path.read_text(encoding="utf-8")))
        run = {"run": content["run"], "policy_state": content["state"]}
        run |= {name: content[name] for name in ("k", "replies", "overlong", "cut", "failed")}
        lines = [
            run
            | {
                "task": task["task_id"],
                "source": task["source"],
                "metric": metric,
                "value": float(value),
            }
            for task in content["tasks"]
            for metric, value in task["metrics"].items()
        ]
        if not lines:
            raise ValueError("no task was scored")
        return pd.DataFrame(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        expected = "delete it and run `snakemake` again"
        raise TableError(f"{path}: not a finished evaluation ({reason}); {expected}") from error


def _measured(scores: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows by experiment, data source, metric and policy state, in the order in which experiments first appear."""
    for experiment, own in scores.groupby("experiment", sort=False):
        sources = sorted(own["source"].unique())
        seated = [
            state for state in own["policy_state"].unique() if state not in STATES
        ]  # other models in some seats
        for dataset, metric in product(
            ["all", *sources] if len(sources) > 1 else sources, own["metric"].unique()
        ):
            part = own[(own["metric"] == metric) & (own["source"].eq(dataset) | (dataset == "all"))]
            states = {state: part[part["policy_state"] == state] for state in [*STATES, *seated]}
            # two seeds of a task are one vote
            columns = {
                s: rows.groupby("task", sort=False)["value"].mean()
                for s, rows in states.items()
                if len(rows)
            }
            pairs = [("trained", "base"), *((cell, "trained") for cell in seated)]
            for state, other in [pair for pair in pairs if all(name in columns for name in pair)]:
                both = (columns[state] - columns[other]).dropna().sort_index()
                columns |= (
                    {f"{state}-{other}": both} if len(both) else {}
                )  # none where each lost what the other has
            for state, by_task in columns.items():
                runs = own[own["policy_state"] == state.partition("-")[0]].drop_duplicates("run")
                low, high = mean_interval(by_task.tolist(), f"{dataset}/{metric}")
                yield {
                    "experiment": experiment,
                    "policy_state": state,  # base | trained | a cell of `evaluate` | a difference, as trained-base
                    "dataset": dataset,  # data source, or "all" of them
                    "metric": metric,  # avg@k | pass@k | maj@k
                    "k": int(runs["k"].iloc[0]),  # answers per task
                    "value": fmean(by_task),
                    "ci_low": low,
                    "ci_high": high,
                    "n": len(by_task),  # tasks
                    "seed_count": len(
                        runs
                    ),  # that differ only in their seed, averaged task by task
                    **_counts(runs, of_all=dataset == "all" or len(sources) == 1),
                }


def _counts(runs: pd.DataFrame, *, of_all: bool) -> dict[str, Any]:
    """What became of the replies of all seeds; "" for one data source of several, as they are counted over all."""
    failed: Counter[str] = sum(map(Counter, runs["failed"]), Counter())
    counts = {
        "replies": int(runs["replies"].sum()),
        "overlong_replies": int(
            runs["overlong"].sum()
        ),  # count as wrong because a prompt was too long
        "cut_replies": int(runs["cut"].sum()),  # had a part of a prompt left out
        "failed_replies": failed.total(),  # are left out: what failed is unknown, not wrong
        "failures": ", ".join(
            f"{n} {why}" for why, n in sorted(failed.items())
        ),  # as "3 EngineError"
    }
    return counts if of_all else dict.fromkeys(counts, "")


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    sign = "+" if "-" in row["policy_state"] else ""
    return {
        "experiment": row["experiment"],
        "policy": row["policy_state"],
        "data": row["dataset"],
        "metric": row["metric"],
        "score": f"{100 * row['value']:{sign}.1f}",
        "95 % interval": f"[{100 * row['ci_low']:{sign}.1f}, {100 * row['ci_high']:{sign}.1f}]",
        "tasks": str(row["n"]),
        "replies": _replies(row),
        "seeds": str(row["seed_count"]),
    }


def _replies(row: Mapping[str, Any]) -> str:
    """How many there are, and in brackets what is to be known of them."""
    notes = [
        f"{row[f'{what}_replies']} {what}" for what in ("overlong", "cut") if row[f"{what}_replies"]
    ]
    if row["failed_replies"]:
        notes.append(f"{row['failed_replies']} failed: {row['failures']}")
    return f"{row['replies']} ({'; '.join(notes)})" if notes else str(row["replies"])


def markdown_table(table: pd.DataFrame) -> str:
    """A Markdown table of text cells, columns of numbers to the right."""
    aligned = ["right" if name in _NUMBERS else "left" for name in table.columns]
    cells = table.map(lambda cell: cell.replace("|", "/"))
    return str(cells.to_markdown(index=False, disable_numparse=True, colalign=aligned))


_READ = (
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


def result_rows(table: Path) -> Iterator[dict[str, str]]:
    """Each experiment's avg@k over all data; of an experiment with a single data source, over that one.

    Raises:
        TableError: the table is not as `make_table` writes it.
    """
    if not table.is_file():
        raise TableError(
            f"{table}: no such file; expected a table of scores (run `snakemake {table}`)"
        )
    scores = pd.read_csv(table, dtype=str, keep_default_na=False)
    missing = [name for name in _READ if name not in scores]
    if missing:
        raise TableError(f"{table}: no column {', '.join(missing)}; expected {', '.join(_READ)}")
    average = scores[scores["metric"].str.startswith("avg@")]
    if average.empty:
        raise TableError(f"{table}: no row of avg@k; make the table again")
    for experiment, own in average.groupby("experiment", sort=False):
        over_all = own[own["dataset"] == "all"] if "all" in set(own["dataset"]) else own
        states = {row["policy_state"]: row for row in over_all.to_dict("records")}
        absent = [state for state in (*STATES, GAIN) if state not in states]
        if absent:
            raise TableError(
                f"{table}, experiment {experiment}: no avg@k of {', '.join(absent)}; evaluate both policy states, "
                "then make the table"
            )
        base, trained, gain = (states[state] for state in (*STATES, GAIN))
        try:
            cells = {
                "metric": gain["metric"],
                "base": f"{100 * float(base['value']):.1f}",
                "trained": f"{100 * float(trained['value']):.1f}",
                "gain": f"{100 * float(gain['value']):+.1f}",
                "95 % interval": f"[{100 * float(gain['ci_low']):+.1f}, {100 * float(gain['ci_high']):+.1f}]",
                "tasks": str(int(gain["n"])),
                "seeds": str(int(gain["seed_count"])),
            }
        except ValueError as error:
            raise TableError(
                f"{table}, experiment {experiment}: not a number ({error}); make the table again"
            ) from error
        yield {"experiment": str(experiment), **cells}


def headline(table: Path) -> list[dict[str, str]]:
    """A row for each experiment of a table of scores; [] of a table with other states."""
    try:
        return list(result_rows(table))
    except TableError:
        return []
