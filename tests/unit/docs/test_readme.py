"""Writers of the README: its table has the numbers of the tables, its picture the curves of the demo's runs."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from docs.writers import curves
from docs.writers.__main__ import WRITERS, main
from docs.writers.results import BEGIN, END, pages, results_block
from mcore_mas.reports.paper_tables import TableError
from mcore_mas.reports.step_metrics import MetricsError
from mcore_mas.reports.tables import make_table
from tests.workflow.test_tables import evaluation

README = Path(__file__).parents[3] / "README.md"

HEAD = "experiment,policy_state,dataset,metric,k,value,ci_low,ci_high,n,seed_count,failed_tasks"
TWO_SOURCES = """\
team,base,all,avg@4,4,0.312500,0.260000,0.360000,200,1,0
team,trained,all,avg@4,4,0.781250,0.730000,0.830000,200,1,0
team,trained-base,all,avg@4,4,0.468750,0.401000,0.529900,199,1,1
team,base,all,pass@4,4,0.500000,0.4,0.6,200,1,0
team,trained,all,pass@4,4,0.900000,0.8,0.95,200,1,0
team,trained-base,all,pass@4,4,0.400000,0.3,0.5,200,1,0
team,base,easy,avg@4,4,0.900000,0.8,0.95,100,1,0
team,trained,easy,avg@4,4,0.950000,0.9,0.99,100,1,0
team,trained-base,easy,avg@4,4,0.050000,0.0,0.1,100,1,0
"""
ONE_SOURCE = """\
solo,base,only,avg@2,2,0.500000,0.4,0.6,50,3,0
solo,trained,only,avg@2,2,0.250000,0.2,0.3,50,3,0
solo,trained-base,only,avg@2,2,-0.250000,-0.3,0.004,50,3,0
"""


def table(folder: Path, name: str, rows: str, head: str = HEAD) -> Path:
    path = folder / f"{name}.csv"
    path.write_text(f"{head}\n{rows}")
    return path


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, without the padding of table cells."""
    return [re.sub(r"(?<=\|):?-+", "---", " ".join(line.split())) for line in text.splitlines()]


def write_results(readme: Path, *tables: Path) -> None:
    for file, text in pages(*tables, readme=readme).items():
        file.write_text(text)


def page(folder: Path, text: str) -> Path:
    path = folder / "README.md"
    path.write_text(text)
    return path


def test_each_experiment_has_one_row_from_the_rows_of_all_data(tmp_path: Path) -> None:
    lines = lines_of(results_block([table(tmp_path, "demo", TWO_SOURCES + ONE_SOURCE)]))
    header = "| experiment | metric | base | trained | gain | 95 % interval | tasks | seeds |"
    assert lines[0] == header
    assert lines[1] == "|---|---|---:|---:|---:|---:|---:|---:|"
    assert lines[2] == "| team | avg@4 | 31.2 | 78.1 | +46.9 | [+40.1, +53.0] | 199 | 1 |"
    assert lines[3] == "| solo | avg@2 | 50.0 | 25.0 | -25.0 | [-30.0, +0.4] | 50 | 3 |"
    assert lines[4] == ""
    assert lines[5].startswith("Scores on held-out tasks in %")
    assert len(lines) == 6


def test_rows_of_other_tables_stay(tmp_path: Path) -> None:
    readme = page(tmp_path, f"{BEGIN}\n{END}\n")
    demo = table(tmp_path, "demo", ONE_SOURCE)
    other_table = table(tmp_path, "other", TWO_SOURCES)
    write_results(readme, demo, other_table)
    changed_demo = table(tmp_path, "demo", ONE_SOURCE.replace("0.500000", "0.600000"))
    write_results(readme, changed_demo)
    lines = lines_of(readme.read_text())
    assert lines[3] == "| demo | solo | avg@2 | 60.0 | 25.0 | -25.0 | [-30.0, +0.4] | 50 | 3 |"
    assert lines[4] == "| other | team | avg@4 | 31.2 | 78.1 | +46.9 | [+40.1, +53.0] | 199 | 1 |"


def test_with_several_tables_a_row_names_its_suite(tmp_path: Path) -> None:
    first = table(tmp_path, "demo", ONE_SOURCE)
    second = table(tmp_path, "seed_2", ONE_SOURCE)
    lines = lines_of(results_block([second, first]))
    assert lines[0].startswith("| suite | experiment | metric |")
    assert lines[1] == "|---|---|---|---:|---:|---:|---:|---:|---:|"
    assert [line[:17] for line in lines[2:4]] == ["| seed_2 | solo |", "| demo | solo | a"]


def test_only_the_block_changes_and_a_second_write_changes_nothing(tmp_path: Path) -> None:
    readme = page(tmp_path, f"# Title\n\n{BEGIN}\nnot generated yet\n{END}\n\nAfter.\n")
    source = table(tmp_path, "demo", ONE_SOURCE)
    write_results(readme, source)
    written = readme.read_text()
    assert written == f"# Title\n\n{BEGIN}\n{results_block([source])}\n{END}\n\nAfter.\n"
    write_results(readme, source)
    assert readme.read_text() == written


def test_tables_of_make_table_can_be_read(tmp_path: Path) -> None:
    files = [
        evaluation(tmp_path / "b.json", "e", "base", {"math-1": [0.0, 0.5]}),
        evaluation(tmp_path / "t.json", "e", "trained", {"math-1": [1.0, 0.5]}),
    ]
    make_table(files, {"e": "e"}, [tmp_path / "t.csv"])
    lines = lines_of(results_block([tmp_path / "t.csv"]))
    # With one task, the interval has no width.
    assert "| e | avg@2 | 25.0 | 75.0 | +50.0 | [+50.0, +50.0] | 1 | 1 |" in lines


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        f"{BEGIN} only",
        f"{END}\n{BEGIN}",
        f"{BEGIN}\n{END}\n{BEGIN}\n{END}",
        f"{BEGIN}{END}{END}",
    ],
)
def test_a_page_without_exactly_one_block_is_not_changed(tmp_path: Path, text: str) -> None:
    readme = page(tmp_path, text)
    with pytest.raises(TableError, match="expected one <!-- results:begin -->"):
        write_results(readme, table(tmp_path, "demo", ONE_SOURCE))
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        (TWO_SOURCES, HEAD.replace("ci_low,", ""), "no column ci_low; expected experiment,"),
        ("", HEAD, "no row of avg@k"),
        (ONE_SOURCE.replace("trained,", "other,"), HEAD, "experiment solo: no avg@k of trained;"),
        (ONE_SOURCE.replace("0.250000", "soon"), HEAD, "experiment solo: not a number .*'soon'"),
    ],
)
def test_a_bad_table_is_reported_in_one_line(
    tmp_path: Path, rows: str, head: str, message: str
) -> None:
    readme = page(tmp_path, f"{BEGIN}\nas before\n{END}\n")
    bad_table = table(tmp_path, "bad", rows, head)
    with pytest.raises(TableError, match=rf"bad\.csv.*{message}") as refusal:
        write_results(readme, bad_table)
    assert "\n" not in str(refusal.value)


def test_the_writers_have_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["docs.writers", "results", "nowhere.csv"])
    message = r"error: nowhere\.csv: no such file; expected a table of scores"
    with pytest.raises(SystemExit, match=message):
        main()
    for writer in WRITERS.values():
        assert callable(import_module(writer.module).pages)


def test_a_missing_table_or_page_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"nowhere\.csv: no such file; expected a table of scores"):
        results_block([tmp_path / "nowhere.csv"])
    with pytest.raises(TableError, match=r"no\.md: no such file"):
        write_results(tmp_path / "no.md", tmp_path / "nowhere.csv")
    with pytest.raises(TableError, match="no table of scores; name tables"):
        write_results(README)


def test_the_readme_has_one_block() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1
    assert text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


def test_the_picture_has_the_curves_of_both_runs(tmp_path: Path) -> None:
    for name in ("sums", "questions"):
        rows = [{"step": step, "reward/mean": step / 4, "outcome/mean": 0.5} for step in range(4)]
        (tmp_path / name / "train").mkdir(parents=True)
        metrics = tmp_path / name / "train" / "metrics.jsonl"
        metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ((file, picture),) = curves.pages(tmp_path / "sums", tmp_path / "questions").items()
    assert file == curves.PICTURE
    assert picture.lstrip().startswith("<svg")
    assert ">sums<" in picture
    assert ">questions<" in picture
    with pytest.raises(MetricsError, match=r"metrics\.jsonl: no such file"):
        curves.pages(tmp_path / "gone")


def test_the_pictures_of_the_page_are_in_the_repository() -> None:
    names = re.findall(
        r"^!\[[^]]+\]\((docs/[^)]+)\)", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert names == ["docs/pictures/demo.svg"]
    assert all((README.parent / name).is_file() for name in names)
    picture = (README.parent / names[0]).read_text(encoding="utf-8")
    assert ">demo_math<" in picture and ">demo_search<" in picture
