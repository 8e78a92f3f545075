"""The page about the papers' tables at the scale tiny, from results made by hand."""

from __future__ import annotations

import json
from pathlib import Path

from docs.writers.tables_tiny import OUTCOMES, SAMPLE, pages
from mcore_mas.reports.paper_tables import PaperTable, table_names


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


def test_the_page_lists_finished_and_failed_experiments(tmp_path: Path) -> None:
    ran, failed = tmp_path / "marti_single_ttrl", tmp_path / "marti_debate_ttrl"
    write(ran / "train" / "done.json", {})
    write(
        ran / "train" / "metrics.jsonl",
        {"step": -1},
        {"step": 0, "policy/p/updates": 2},
        {"policy/p/updates": 1, "policy/q/updates": 0},
    )
    write(ran / "evaluation" / "trained.json", {})
    write(
        ran / "benchmarks" / "train.jsonl",
        {"s": 999.0, "cpu_time": 1.0},
        {"s": 40.2, "cpu_time": 30.0},
    )
    write(ran / "benchmarks" / "evaluate_trained.jsonl", {"s": 9.9, "cpu_time": 8.0})
    write(failed / "logs" / "train.log", "Traceback", "error: no engine")
    write(tmp_path / "mappa_dsbench" / "config.yaml")
    write(tmp_path / "mappa_mathchat" / "evaluation" / "base.json", {})
    write(tmp_path / "tables" / "marti_ttrl.json", {"commit": "abc1"})
    page = pages(tmp_path)[OUTCOMES]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:1] == "|"
    ]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["`table_marti_ttrl`"] == ["MARTI, test-time RL, DeepScaleR-1.5B", "yes", "1 of 2"]
    assert (rows["`table_mappa_1`"][1:], rows["`table_mappa_2`"][1:]) == (
        ["no", "1 of 1"],
        ["no", "0 of 1"],
    )
    assert rows["`mappa_mathchat`"] == ["ran untrained", "", "", "base", ""]
    assert rows["`marti_single_ttrl`"] == ["ran", "p 3, q 0", "40", "trained", "10"]
    assert rows["`marti_debate_ttrl`"][0] == "failed, train: no engine"
    assert (rows["`mappa_dsbench`"][0], rows["`drmas_f5_hetero`"][0]) == ("unfinished", "not run")
    assert "1 of 17 tables and 2 of 92 experiments were run" in page
    assert "at commit abc1, in 50 s\nof jobs, 38 s of processor time" in page


def test_the_page_has_every_table_and_experiment(tmp_path: Path) -> None:
    page = pages(tmp_path)[OUTCOMES]
    for name in table_names():
        assert f"| `table_{name}` " in page
        assert all(f"| `{experiment}` " in page for experiment in PaperTable.load(name).experiments)


def test_a_finished_table_is_shown_with_a_head_that_says_how_small_it_is(tmp_path: Path) -> None:
    assert [*pages(tmp_path)] == [OUTCOMES]
    write(tmp_path / "tables" / "drmas_1.md", "# Dr.MAS", "", "**Scale tiny.**")
    assert pages(tmp_path)[SAMPLE].startswith(
        "# Dr.MAS\n\n**Scale tiny.**\n\nCopied by `python -m docs.writers "
    )
