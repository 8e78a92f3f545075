"""Curves from a run's metrics.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mcore_mas.reports.charts import picture_of_key_curves, sections, write_charts
from mcore_mas.reports.curves import curve, curves_of
from mcore_mas.reports.step_metrics import MetricsError
from tests.support.run_files import METRICS_DAMAGE, damage_cases, write_small_run

ROWS = [
    {"step": -1, "validation/accuracy": 0.2},
    {"step": 0, "reward/mean": 0.5, "agent/solver/grad_norm": 1.0, "policy/solver/grad_norm": 9.0},
    {"step": 1, "reward/mean": 0.7, "validation/accuracy": 0.4, "agent/verifier/grad_norm": 2.0},
]


def write(path: Path, rows: list[dict[str, float]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_curve_counts_steps_from_1_and_skips_steps_without_the_metric() -> None:
    assert curve(ROWS, "reward/mean").to_dict() == {1: 0.5, 2: 0.7}
    assert curve(ROWS, "validation/accuracy").to_dict() == {0: 0.2, 2: 0.4}
    curves = curves_of(ROWS, "agent", "grad_norm")
    norms = {agent: values.to_dict() for agent, values in curves.items()}
    assert norms == {"solver": {1: 1.0}, "verifier": {2: 2.0}}


def test_the_thick_line_is_a_running_mean_of_earlier_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plotted: list[list[float]] = []

    def record_plot(_: object, x: object, y: Iterable[float], **style: object) -> None:
        plotted.append(list(y))

    monkeypatch.setattr("matplotlib.axes.Axes.plot", record_plot)
    rewards = [1.0, 2.0, 3.0, 6.0, 8.0, 11.0]
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards)]
    rows.append({"step": 10, "validation/accuracy": 1.0})
    rows.append({"step": 20, "validation/accuracy": 0.0})
    write_charts({"demo": write(tmp_path / "metrics.jsonl", rows)}, tmp_path / "charts.html")
    assert plotted == [
        [1.0, 2.0, 3.0, 6.0, 8.0, 11.0],
        [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        [1.0, 0.0],
    ]


def test_runs_share_panels_and_metrics_that_are_always_zero_are_left_out() -> None:
    other_rows = [
        {
            "step": 0,
            "agent/solver/grad_norm": 3.0,
            "agent/solver/masked": 0.0,
            "validation/gsm8k/accuracy": 0.5,
        }
    ]
    values_by_section = {
        section: {
            panel: {run: list(values) for run, values in curves.items()}
            for panel, curves in panels.items()
        }
        for section, panels in sections({"demo": ROWS, "other": other_rows}).items()
    }
    assert list(values_by_section) == [
        "reward and accuracy",
        "validation accuracy by source",
        "gradient norm by agent",
    ]
    assert values_by_section["reward and accuracy"]["validation accuracy"] == {"demo": [0.2, 0.4]}
    assert values_by_section["validation accuracy by source"] == {"gsm8k": {"other": [0.5]}}
    assert values_by_section["gradient norm by agent"] == {
        "solver": {"demo": [1.0], "other": [3.0]},
        "verifier": {"demo": [2.0]},
    }


@pytest.mark.slow
def test_equal_numbers_give_equal_pages_and_names_are_escaped(
    tmp_path: Path,
) -> None:
    rows = [*ROWS, {"step": 2, "agent/<script>alert(1)</script>$x/grad_norm": 1.0}]
    runs = {
        "demo": write(tmp_path / "metrics.jsonl", rows),
        "bare": write(tmp_path / "bare.jsonl", [{"step": 0}]),
    }
    for name in ("one.html", "two.html"):
        write_charts(runs, tmp_path / name)
    page = (tmp_path / "one.html").read_text()
    assert page == (tmp_path / "two.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page
    assert (
        page.count("<svg") == 2
        and 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    )


def test_axes_have_whole_steps_and_full_numbers(tmp_path: Path) -> None:
    rows = [
        {"step": step, "agent/solver/sampled_entropy": 6.8523 - 0.0003 * step} for step in range(2)
    ]
    write_charts({"demo": write(tmp_path / "metrics.jsonl", rows)}, tmp_path / "charts.html")
    *_, solver = re.split(r"no such metric was logged", (tmp_path / "charts.html").read_text())
    labels = re.findall(r">([^<]*)</text>", solver.partition("validation accuracy")[2])
    assert labels[:4] == [
        "1",
        "2",
        "training step",
        "6.85200",
    ]  # and not 1.2, nor 0.0000 and an offset
    assert labels[-3:] == ["6.85230", "solver", "demo"]


def test_the_names_of_many_runs_are_not_wider_than_their_panels(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": 0.1 * step} for step in range(3)]
    path = write(tmp_path / "metrics.jsonl", rows)
    write_charts(
        {f"drmas_t1_4b_nonshared_drmas_{run}": path for run in range(6)}, tmp_path / "charts.html"
    )
    page = (tmp_path / "charts.html").read_text()
    columns = re.findall(r'x="([\d.]+)" y="[\d.]+" transform="[^"]*">drmas', page)
    assert (len(columns), len(set(columns))) == (6, 3)  # in as many columns as there are panels


@pytest.mark.parametrize("damage", **damage_cases(METRICS_DAMAGE))
def test_damaged_metrics_hide_no_other_run(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    runs = {
        name: write_small_run(tmp_path / name, {"t": 0.5}) / "train" / "metrics.jsonl"
        for name in ("first", "broken", "last")
    }
    damage(tmp_path / "broken")
    write_charts(runs, tmp_path / "charts.html")
    page = (tmp_path / "charts.html").read_text()
    assert ">first</text>" in page and ">last</text>" in page and ">broken</text>" not in page
    assert f"A run is left out: {runs['broken']}: " in page
    assert "2 runs" in page


@pytest.mark.parametrize("content", ["", "{", '{"reward/mean": 1}\n'])
def test_bad_metrics_are_reported_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(MetricsError, match="train the run again") as error:
        write_charts({"demo": path}, tmp_path / "charts.html")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_picture_of_the_report_has_the_runs_that_can_be_read(tmp_path: Path) -> None:
    good = write_small_run(tmp_path / "good", {"t": 0.5}) / "train/metrics.jsonl"
    picture = picture_of_key_curves({"good": good, "missing": tmp_path / "metrics.jsonl"})
    assert picture.startswith("<svg ") and picture.endswith("</svg>")
    assert 'xmlns="http://www.w3.org/2000/svg"' in picture
    assert ">good<" in picture and ">missing<" not in picture
    assert picture_of_key_curves({"missing": tmp_path / "metrics.jsonl"}) == ""


def test_the_strategy_in_a_game_has_a_section() -> None:
    assert "strategy in the game" not in sections({"run": ROWS})
    rows = [{"step": -1, "validation/exploitability": 0.4}, {"step": 9, "reward/mean": 0.0}]
    panels = sections({"run": rows})["strategy in the game"]
    assert panels["exploitability, in points per game"]["run"].to_dict() == {0: 0.4}
    assert panels["probability of a legal reply"] == {}
