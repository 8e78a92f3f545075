"""The page on a suite's runs: jobs, settings that differ, and conversations that a browser shows in frames."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from mcore_mas.reports.runs import write_runs_page
from rollout.records.files import write_tasks, write_trajectories
from rollout.records.trajectory import Task
from tests.support.browser import browse, needs_chromium
from tests.support.played import failed, trajectory, turn
from tests.unit.reports.test_runs import make_run

HOSTILE = '"></iframe><script>alert(1)</script>'


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Of two runs: in the first a walk that is solved only after training, and one that never is."""
    first = make_run(tmp_path / "a", {"t": 0.5})
    make_run(tmp_path / "b", {"t": 1.0}, seed=2)
    walk = Task(
        id="walk",
        prompt="S 1 1 G 1 3\nS . G",
        answers=("R R",),
        env="plan_path",
        source="s",
        split="test",
    )
    write_tasks(first / "tasks" / "test.parquet", [walk, replace(walk, id="far")])
    said = {"base": ("I rest.", 0.0), "trained": ("I see.\n#### R R", 1.0)}
    for state, (text, outcome) in said.items():
        played = [failed(turn(0)), trajectory(turn(0, text=text), task_id="walk", outcome=outcome)]
        far = trajectory(turn(0, text=HOSTILE), task_id="far", outcome=0.0)
        write_trajectories(first / "evaluation" / state / "part_000000.parquet", [*played, far])
    (first / "benchmarks").mkdir()
    rows = [{"s": 3.0}, {"s": 12.4}]  # of a job that ran twice
    (first / "benchmarks" / "train.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    write_runs_page(tmp_path, ["a", "b"], tmp_path / "tables" / "s.runs.html")
    return tmp_path / "tables" / "s.runs.html"


def test_the_page_has_jobs_settings_and_what_was_said(page: Path) -> None:
    text = page.read_text()
    assert '<th class="number">train</th>' in text and '<td class="number">12</td>' in text
    assert "<tr><td>seed</td><td>1</td><td>2</td></tr>" in text and "1 setting<" in text
    before, after, lost = text.split("<h3>")[1:]
    assert before.startswith("before training") and "I rest." in before and "completed" in before
    assert after.startswith("after training<") and "#### R R" in after
    # the board, and the board after a turn: the walker rests before training, and stands on the goal after it
    assert (before.count(">S</text>"), before.count(">G</text>")) == (2, 2)
    assert (after.count(">S</text>"), after.count(">G</text>")) == (2, 1)
    assert lost.startswith("after training, not solved") and "<script" not in text
    assert "What the team of b said" not in text


@needs_chromium
def test_a_browser_shows_the_conversations_in_their_frames(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    options = (f"--screenshot={picture}", "--window-size=1000,2000")
    for seconds in (2, 10, 30):  # a busy machine draws frames late
        dom = browse(page.as_uri(), tmp_path / f"profile{seconds}", *options, seconds=seconds)
        assert dom.count("<iframe sandbox") == 3
        pixels = (imread(picture)[..., :3] * 255).round()
        drawn = (
            (pixels == (0x00, 0x72, 0xB2)).all(axis=-1).any()
        )  # the first agent's colour, which only a frame has
        if drawn:
            break
    assert drawn
