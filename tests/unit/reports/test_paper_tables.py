"""Papers' tables as data: what their cells stand for, and numbers that can be compared with the papers by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.experiments import experiments
from mcore_mas.reports.paper_tables import TABLES, PaperTable, TableError, table_names, tables_of


@pytest.mark.parametrize("name", table_names())
def test_every_cell_names_an_experiment_and_a_grade(name: str) -> None:
    table = PaperTable.load(name)
    known = [cell for cell in table.cells if cell.published is not None]
    assert bool(known) == (table.grade != "none" and name != "drmas_f5") and table.source
    assert {cell.experiment for cell in table.cells} <= experiments().keys()
    system = {
        "unitymas": "unitymas",
        "strongermas": "strongermas",
        "drmas": "drmas",
        "marti": "marti",
        "mappa": "mappa",
    }
    own = system.get(name.split("_")[0], "")
    assert all(cell.experiment.startswith(own) for cell in table.cells)


def test_every_published_experiment_is_in_a_table() -> None:
    used = {name for table in table_names() for name in PaperTable.load(table).experiments}
    assert len(used) == 92
    assert used == {name for name in experiments() if not name.startswith("demo_")}


def test_dr_mas_table_1_by_hand() -> None:
    cells = {(c.block, c.row, c.column, c.metric): c for c in PaperTable.load("drmas_1").cells}
    cell = cells["Qwen3-4B", "AIME24", "NS Dr.MAS", "pass@16"]
    assert (cell.published, cell.our_metric, cell.experiment) == (
        80.0,
        "pass",
        "drmas_t1_4b_separate_drmas",
    )
    assert (cell.dataset, cell.state) == ("aime_2024", "trained")
    untrained = cells["Qwen3-8B", "Avg", "Sh untrained", "avg@16"]
    assert (untrained.published, untrained.state, untrained.dataset) == (None, "base", "average")


@pytest.mark.parametrize("name", ["drmas_1", "drmas_2", "marti_llama", "marti_qwen"])
def test_averages_of_the_papers_are_of_their_rows(name: str) -> None:
    """What is copied by hand adds up, to the rounding of the paper."""
    lines: dict[tuple[str, str, str], list[float]] = {}
    averages = {}
    for cell in PaperTable.load(name).cells:
        key = (cell.block, cell.column if name.startswith("drmas") else cell.row, cell.metric)
        if cell.dataset == "average":
            averages[key] = cell.published
        elif isinstance(cell.published, float):
            lines.setdefault(key, []).append(cell.published)
    compared = [(key, averages[key], sum(line) / len(line)) for key, line in lines.items()]
    assert len(compared) >= 4
    assert [
        (key, paper) for key, paper, mean in compared if abs(float(str(paper)) - mean) > 0.11
    ] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("grade: primary", "grade: rumour"),
            "grade: Input should be 'primary', 'secondary' or 'none'",
        ),
        (("drmas_t1_{size}", "drmas_t9_{size}"), "no experiment 'drmas_t9_4b_single_grpo'"),
        (("39.3/64.0", "39.3"), "cell '39.3' has 1 numbers; expected 2"),
        (
            ("state: base", "state: bass"),
            "state 'bass' of AIME24, SA untrained; expected base, trained, gain",
        ),
        (("[Sh Dr.MAS, Sh GRPO]", "[Sh Dr.MAS, GRPO]"), "compare: no row or column 'GRPO'"),
        (("AIME25: [33.1", "AIME26: [33.1"), "values of 'AIME26', which is not a row"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_line(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    (tmp_path / "t.yaml").write_text((TABLES / "drmas.yaml").read_text().replace(*change, 1))
    with pytest.raises(TableError) as caught:
        PaperTable.load("drmas_1", tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(TableError, match="no table 'u'; tables: drmas_1, drmas_2, "):
        PaperTable.load("u", tmp_path)


def test_a_file_may_be_one_table_as_in_bundles_of_before(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(tables_of()["drmas_3"][1]))
    assert PaperTable.load("table", tmp_path) == PaperTable.load("drmas_3").model_copy(
        update={"name": "table"}
    )
    (tmp_path / "u.yaml").write_text("a: [")
    with pytest.raises(TableError, match=r"u\.yaml: .*see docs/tables\.md"):
        table_names(tmp_path)
