"""Tables of papers as data: experiments and numbers of their cells, some compared with the paper by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.experiments import experiments
from mcore_mas.reports.paper_tables import (
    TABLES,
    PaperTable,
    TableError,
    table_names,
    tables_in_folder,
)


@pytest.mark.parametrize("name", table_names())
def test_every_cell_names_an_experiment_and_a_grade(name: str) -> None:
    table = PaperTable.load(name)
    has_published_numbers = any(cell.published is not None for cell in table.cells)
    # drmas_f5 is a figure, whose curves are not copied.
    assert has_published_numbers == (table.grade != "none" and name != "drmas_f5")
    assert table.source
    assert {cell.experiment for cell in table.cells} <= experiments().keys()
    system = name.split("_")[0]
    if system in ("unitymas", "strongermas", "drmas", "marti", "mappa"):
        assert all(cell.experiment.startswith(system) for cell in table.cells)


def test_every_published_experiment_is_in_a_table() -> None:
    used = {name for table in table_names() for name in PaperTable.load(table).experiments}
    assert len(used) == 92
    assert used == {name for name in experiments() if not name.startswith("demo_")}


def test_dr_mas_table_1_by_hand() -> None:
    cells = {
        (cell.block, cell.row, cell.column, cell.metric): cell
        for cell in PaperTable.load("drmas_1").cells
    }
    trained = cells["Qwen3-4B", "AIME24", "NS Dr.MAS", "pass@16"]
    assert trained.published == 80.0
    assert trained.our_metric == "pass"
    assert trained.experiment == "drmas_t1_4b_separate_drmas"
    assert trained.dataset == "aime_2024"
    assert trained.state == "trained"
    untrained = cells["Qwen3-8B", "Avg", "Sh untrained", "avg@16"]
    assert untrained.published is None
    assert untrained.state == "base"
    assert untrained.dataset == "average"


@pytest.mark.parametrize("name", ["drmas_1", "drmas_2", "marti_llama", "marti_qwen"])
def test_published_averages_are_the_means_of_the_copied_numbers(name: str) -> None:
    """Check numbers that were copied by hand, to the rounding of the paper."""
    lines: dict[tuple[str, str, str], list[float]] = {}
    averages = {}
    for cell in PaperTable.load(name).cells:
        key = (cell.block, cell.column if name.startswith("drmas") else cell.row, cell.metric)
        if cell.dataset == "average":
            averages[key] = cell.published
        elif isinstance(cell.published, float):
            lines.setdefault(key, []).append(cell.published)
    assert len(lines) >= 4
    for key, numbers in lines.items():
        mean = sum(numbers) / len(numbers)
        assert float(str(averages[key])) == pytest.approx(mean, abs=0.11), key


@pytest.mark.parametrize(
    ("change", "message"),
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
        (
            ("SA GRPO: {method", "SA GRPO: {metric: mean, method"),
            "metric 'mean' of AIME24, SA GRPO; expected avg, pass, maj",
        ),
        (("[Sh Dr.MAS, Sh GRPO]", "[Sh Dr.MAS, GRPO]"), "compare: no row or column 'GRPO'"),
        (
            ("[Sh Dr.MAS, Sh GRPO]", "[Sh Dr.MAS, AIME24]"),
            "one of 'Sh Dr.MAS' and 'AIME24' is a row, and the other a column",
        ),
        (
            ("SA GRPO: {method: single_grpo}", "SA GRPO: {}"),
            "field 'method' is set by none of block 'Qwen3-4B', row 'AIME24' and column 'SA GRPO'",
        ),
        (("AIME25: [33.1", "AIME26: [33.1"), "values of 'AIME26', which is not a row"),
        (
            ("46.9/80.0]", "46.9/80.0, 1/2, 3/4, 5/6]"),
            "values of row 'AIME24' in block 'Qwen3-4B': 8 for 7 columns; remove the surplus",
        ),
        (
            (
                "AIME24: [38.8/63.3, 39.3/64.0, 39.3/63.3, 42.7/73.3, 46.9/80.0]",
                "AIME24: 38.8/63.3",
            ),
            "values of row 'AIME24' in block 'Qwen3-4B' are 38.8/63.3; expected a list",
        ),
        (
            ("size: 4b\n      values:", "size: 4b\n      values: 3\n      numbers:"),
            "values of block 'Qwen3-4B' are 3; expected a list of numbers for each row",
        ),
    ],
)
def test_an_invalid_table_is_refused_in_one_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (tmp_path / "t.yaml").write_text((TABLES / "drmas.yaml").read_text().replace(*change, 1))
    with pytest.raises(TableError) as caught:
        PaperTable.load("drmas_1", tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(TableError, match="no table 'u'; tables: drmas_1, drmas_2, "):
        PaperTable.load("u", tmp_path)


def test_a_file_may_have_one_table_as_in_older_bundles(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(tables_in_folder()["drmas_3"][1]))
    assert PaperTable.load("table", tmp_path) == PaperTable.load("drmas_3").model_copy(
        update={"name": "table"}
    )
    (tmp_path / "u.yaml").write_text("a: [")
    with pytest.raises(TableError, match=r"u\.yaml: .*see docs/tables\.md"):
        table_names(tmp_path)
