"""Tables of scores, with numbers computed by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.paper_tables import TableError
from mcore_mas.reports.tables import make_table

COLUMNS = "experiment,policy_state,dataset,metric,k,value,ci_low,ci_high,n,seed_count"


def evaluation(
    path: Path, run: str, state: str, scores_by_task: dict[str, list[float]], **counts: Any
) -> Path:
    """Write the file of an evaluation; return its path.

    Args:
        scores_by_task: scores of each task's samples. The source of a task is its name before the dash.
        counts: counts of replies that differ from the defaults.
    """
    k = len(next(iter(scores_by_task.values())))
    tasks = [
        {
            "task_id": task,
            "source": task.partition("-")[0],
            "scores": scores,
            "metrics": {f"avg@{k}": fmean(scores), f"pass@{k}": max(scores)},
        }
        for task, scores in scores_by_task.items()
    ]
    counts = {"replies": k * len(tasks), "overlong": 0, "cut": 0, "failed": {}} | counts
    content = {"run": run, "state": state, "k": k, **counts, "rows": [], "tasks": tasks}
    path.write_text(json.dumps(content))
    return path


def rows_of(path: Path) -> dict[tuple[str, str, str, str], dict[str, str]]:
    """Return the rows of a CSV table by experiment, data set, metric and state."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["experiment"], row["dataset"], row["metric"], row["policy_state"]): row for row in rows
    }


def test_two_tasks_by_hand(tmp_path: Path) -> None:
    base = evaluation(
        tmp_path / "b.json", "demo", "base", {"easy-1": [1, 0, 0, 0], "hard-1": [0, 0, 0, 0]}
    )
    trained = evaluation(
        tmp_path / "t.json", "demo", "trained", {"easy-1": [1, 1, 0, 0], "hard-1": [1, 1, 1, 1]}
    )
    table = tmp_path / "demo.csv"
    make_table([base, trained], {"demo": "demo"}, [table])
    assert table.read_text().splitlines()[0].startswith(COLUMNS)
    rows = rows_of(table)
    # all, easy and hard; avg and pass; base, trained and their difference
    assert len(rows) == 3 * 2 * 3

    def number(dataset: str, metric: str, state: str, column: str = "value") -> float:
        return float(rows["demo", dataset, metric, state][column])

    assert number("all", "avg@4", "base") == 0.125
    assert number("all", "avg@4", "trained") == 0.75
    assert number("all", "avg@4", "trained-base") == 0.625
    assert number("all", "pass@4", "base") == 0.5
    assert number("all", "pass@4", "trained-base") == 0.5
    assert number("easy", "avg@4", "trained-base") == 0.25
    # Replies are counted over all data sources, so that the row of one source has no count.
    replies = {
        dataset: rows["demo", dataset, "avg@4", "base"]["replies"]
        for dataset in ("all", "easy", "hard")
    }
    assert replies == {"all": "8", "easy": "", "hard": ""}
    # The two tasks gain 0.25 and 1, with a standard error of 0.375. Student's t of two values is
    # 12.7062, so that the interval is clipped to the range of a gain.
    assert number("all", "avg@4", "trained-base", "ci_low") == -1.0
    assert number("all", "avg@4", "trained-base", "ci_high") == 1.0
    assert number("all", "avg@4", "base", "n") == 2
    assert number("hard", "avg@4", "base", "n") == 1
    assert rows["demo", "all", "avg@4", "base"]["k"] == "4"


def test_a_single_source_has_no_row_for_all_sources(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "b.json", "demo", "base", {"math-1": [1.0, 0.0]})
    make_table([base], {"demo": "demo"}, [tmp_path / "t.csv"])
    assert set(rows_of(tmp_path / "t.csv")) == {
        ("demo", "math", "avg@2", "base"),
        ("demo", "math", "pass@2", "base"),
    }


def test_the_difference_is_paired_by_task(tmp_path: Path) -> None:
    before = {f"math-{i}": [float(i % 2), 0.0, 0.0, 0.0] for i in range(40)}
    # Every task gains 1/4, so that the interval has no width.
    after = {task: [scores[0], 1.0, 0.0, 0.0] for task, scores in before.items()}
    files = [
        evaluation(tmp_path / "b.json", "demo", "base", before),
        evaluation(tmp_path / "t.json", "demo", "trained", after),
    ]
    make_table(files, {"demo": "demo"}, [tmp_path / "t.csv"])
    gain = rows_of(tmp_path / "t.csv")["demo", "math", "avg@4", "trained-base"]
    assert (gain["value"], gain["ci_low"], gain["ci_high"]) == ("0.250000", "0.250000", "0.250000")


def test_failed_and_cut_replies_are_counted_beside_the_score(tmp_path: Path) -> None:
    counts = {"overlong": 2, "failed": {"EngineError": 3}}
    counts_of_second_seed = {"cut": 1, "failed": {"EngineError": 1, "late/trajectory": 1}}
    scores = {"math-1": [1.0, 0.0]}
    files = [
        evaluation(tmp_path / "1.json", "demo", "base", scores, **counts),
        evaluation(tmp_path / "2.json", "demo_s2", "base", scores, **counts_of_second_seed),
    ]
    make_table(files, {"demo": "demo", "demo_s2": "demo"}, [tmp_path / "t.csv", tmp_path / "t.md"])
    row = rows_of(tmp_path / "t.csv")["demo", "math", "avg@2", "base"]
    assert row["replies"] == "4"
    assert row["overlong_replies"] == "2"
    assert row["cut_replies"] == "1"
    assert row["failed_replies"] == "5"
    assert row["failures"] == "4 EngineError, 1 late/trajectory"
    cell = "4 (2 overlong; 1 cut; 5 failed: 4 EngineError, 1 late/trajectory)"
    assert cell in (tmp_path / "t.md").read_text()


def test_a_metric_of_some_tasks_is_averaged_over_those_tasks(tmp_path: Path) -> None:
    base = evaluation(
        tmp_path / "b.json", "demo", "base", {"math-1": [1.0, 0.0], "code-1": [1.0, 1.0]}
    )
    content = json.loads(base.read_text())
    content["tasks"][0]["metrics"]["maj@2"] = 1.0  # programs have no answers for a majority vote
    base.write_text(json.dumps(content))
    make_table([base], {"demo": "demo"}, [tmp_path / "t.csv"])
    rows = rows_of(tmp_path / "t.csv")
    assert rows["demo", "all", "maj@2", "base"]["n"] == "1"
    assert rows["demo", "all", "avg@2", "base"]["n"] == "2"
    assert ("demo", "code", "maj@2", "base") not in rows


def test_teams_with_other_models_in_some_seats_are_compared_with_the_trained_team(
    tmp_path: Path,
) -> None:
    scores_by_state = {
        "base": {"math-1": [0, 0], "math-2": [0, 0]},
        "trained": {"math-1": [1, 1], "math-2": [1, 1]},
        "without_verifier": {"math-1": [1, 1], "math-2": [0, 0]},
    }
    files = [
        evaluation(tmp_path / f"{state}.json", "demo", state, scores)
        for state, scores in scores_by_state.items()
    ]
    make_table(files, {"demo": "demo"}, [tmp_path / "t.csv"])
    values = {
        state: float(row["value"])
        for (_, _, metric, state), row in rows_of(tmp_path / "t.csv").items()
        if metric == "avg@2"
    }
    assert values == {
        "base": 0.0,
        "trained": 1.0,
        "without_verifier": 0.5,
        "trained-base": 1.0,
        "without_verifier-trained": -0.5,
    }


def test_a_task_that_failed_in_one_state_is_not_in_the_difference(tmp_path: Path) -> None:
    files = [
        evaluation(tmp_path / "b.json", "demo", "base", {"math-1": [0.0], "math-2": [1.0]}),
        evaluation(tmp_path / "t.json", "demo", "trained", {"math-1": [1.0]}),
    ]
    make_table(files, {"demo": "demo"}, [tmp_path / "t.csv"])
    gain = rows_of(tmp_path / "t.csv")["demo", "math", "avg@1", "trained-base"]
    assert (gain["value"], gain["n"]) == ("1.000000", "1")

    # Without a task that both states have, there is no difference.
    files[1] = evaluation(tmp_path / "t.json", "demo", "trained", {"math-3": [1.0]})
    make_table(files, {"demo": "demo"}, [tmp_path / "t.csv"])
    assert {state for *_, state in rows_of(tmp_path / "t.csv")} == {"base", "trained"}


def test_seeds_of_an_experiment_share_a_row_in_which_every_task_has_the_same_weight(
    tmp_path: Path,
) -> None:
    files = [
        evaluation(tmp_path / "1.json", "demo", "base", {"math-1": [1.0], "math-2": [0.0]}),
        evaluation(
            tmp_path / "2.json",
            "demo_s2",
            "base",
            {"math-1": [0.0], "math-2": [0.0], "math-3": [1.0]},
        ),
    ]
    make_table(files, {"demo": "demo", "demo_s2": "demo"}, [tmp_path / "t.csv"])
    row = rows_of(tmp_path / "t.csv")["demo", "math", "avg@1", "base"]
    assert row["value"] == "0.500000"  # (1/2 + 0 + 1) / 3
    assert row["n"] == "3"
    assert row["seed_count"] == "2"


def test_a_table_is_also_written_as_markdown_and_html(tmp_path: Path) -> None:
    base = evaluation(tmp_path / "b.json", "demo", "base", {"math-1": [1.0, 0.0]})
    make_table([base], {"demo": "demo"}, [tmp_path / "t.md", tmp_path / "t.html"])
    lines = [" ".join(line.split()) for line in (tmp_path / "t.md").read_text().splitlines()]
    assert "| demo | base | math | avg@2 | 50.0 | [50.0, 50.0] | 1 | 2 | 1 |" in lines
    assert "<td>avg@2</td>" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ("{}", "no key 'run'"),
        (
            '{"run": "r", "state": "base", "k": 1, "replies": 0, "overlong": 0, "cut": 0, "failed": {}, "tasks": []}',
            "no task",
        ),
        (None, "No such file"),
    ],
)
def test_a_bad_evaluation_is_reported_in_one_line(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "base.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TableError, match=reason) as refusal:
        make_table([path], {}, [tmp_path / "t.csv"])
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "t.csv").exists()


def test_an_interval_is_reproducible_and_has_the_width_of_the_binomial() -> None:
    values = [0.0, 1.0] * 50
    low, high = mean_interval(values, "x")
    assert (low, high) == mean_interval(values, "x")
    # The mean of 100 fair coins has a standard deviation of 0.05.
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.011)
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.011)
    assert mean_interval([0.3], "x") == (0.3, 0.3)
