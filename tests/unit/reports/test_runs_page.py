"""The page of a suite's runs: jobs, settings, and conversations in frames."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from mcore_mas.reports.runs_page import write_runs_page
from rollout.records.files import write_tasks, write_trajectories
from rollout.records.trajectory import Task
from tests.support.browser import browse, needs_chromium
from tests.support.played import failed, trajectory, turn
from tests.support.run_files import CONFIG_DAMAGE, damage_cases, write_small_run

HOSTILE = '"></iframe><script>alert(1)</script>'
WALK = Task(
    id="walk",
    prompt="S 1 1 G 1 3\nS . G",
    answers=("R R",),
    env="plan_path",
    source="s",
    split="test",
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return the page of two runs.

    The first has a walk that only the trained team solves, and one that no team solves.
    """
    first = write_small_run(tmp_path / "a", {"t": 0.5})
    write_small_run(tmp_path / "b", {"t": 1.0}, seed=2)
    write_tasks(first / "tasks" / "test.parquet", [WALK, replace(WALK, id="far")])
    for state, text, outcome in (("base", "I rest.", 0.0), ("trained", "I see.\n#### R R", 1.0)):
        walked = turn(0, text=text, scores={"team": outcome})
        lost = turn(0, text=HOSTILE, scores={"team": 0.0})
        played = [
            failed(turn(0)),
            trajectory(walked, task_id="walk", outcome=outcome),
            trajectory(lost, task_id="far", outcome=0.0),
        ]
        write_trajectories(first / "evaluation" / state / "part_000000.parquet", played)
    (first / "benchmarks").mkdir()
    (first / "benchmarks" / "train.jsonl").write_text(
        "".join(f"{json.dumps({'s': seconds})}\n" for seconds in (3.0, 12.4))  # it ran twice
    )
    out = tmp_path / "tables" / "s.runs.html"
    write_runs_page(tmp_path, ["a", "b"], out)
    return out


def test_the_page_has_jobs_settings_and_conversations(page: Path) -> None:
    text = page.read_text()
    assert '<th class="number">train</th>' in text
    assert '<td class="number">12</td>' in text
    assert "<tr><td>seed</td><td>1</td><td>2</td></tr>" in text
    assert "1 setting<" in text
    before, after, unsolved = text.split("<h3>")[1:]
    assert before.startswith("before training") and "I rest." in before and "completed" in before
    assert after.startswith("after training<") and "#### R R" in after
    assert unsolved.startswith("after training, not solved")
    assert "<script" not in text
    assert "Conversations of b" not in text
    # Each picture has the first board and one more. After training the walker is on the goal.
    assert (before.count(">S</text>"), before.count(">G</text>")) == (2, 2)
    assert (after.count(">S</text>"), after.count(">G</text>")) == (2, 1)


def test_a_task_that_stays_unsolved_is_not_shown_twice(page: Path, tmp_path: Path) -> None:
    second = tmp_path / "b"
    write_tasks(second / "tasks" / "test.parquet", [WALK, replace(WALK, id="far")])
    folder = second / "evaluation" / "trained"
    walk = trajectory(turn(0, text="I rest."), task_id="walk", outcome=0.0)
    write_trajectories(folder / "part_000000.parquet", [walk])
    write_runs_page(tmp_path, ["b"], page)
    (after,) = page.read_text().split("<h3>")[1:]
    assert after.startswith("after training<") and "I rest." in after

    unsolved_play = trajectory(turn(0, text="I wait."), task_id="far", outcome=0.0)
    write_trajectories(folder / "part_000000.parquet", [walk, unsolved_play])
    write_runs_page(tmp_path, ["b"], page)
    after, unsolved = page.read_text().split("<h3>")[1:]
    assert after.startswith("after training<") and "I rest." in after
    assert unsolved.startswith("after training, not solved") and "I wait." in unsolved


def test_a_negative_outcome_is_not_solved(page: Path, tmp_path: Path) -> None:
    second = tmp_path / "b"
    write_tasks(second / "tasks" / "test.parquet", [WALK, replace(WALK, id="far")])
    outcomes = {"base": {"walk": 0.0, "far": -1.0}, "trained": {"walk": -1.0, "far": 1.0}}
    for state, by_task in outcomes.items():
        played = [
            trajectory(turn(0, text=f"{state} {task}"), task_id=task, outcome=outcome)
            for task, outcome in by_task.items()
        ]
        write_trajectories(second / "evaluation" / state / "part_000000.parquet", played)
    write_runs_page(tmp_path, ["b"], page)
    before, after, unsolved = page.read_text().split("<h3>")[1:]
    assert before.startswith("before training") and "base far" in before
    assert after.startswith("after training<") and "trained far" in after
    assert unsolved.startswith("after training, not solved") and "trained walk" in unsolved


@pytest.mark.parametrize("damage", **damage_cases(CONFIG_DAMAGE))
def test_a_damaged_config_hides_no_other_run(
    page: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(write_small_run(tmp_path / "broken", {"t": 1.0}))
    write_runs_page(tmp_path, ["a", "broken", "b"], page)
    text = page.read_text()
    assert "<tr><td>seed</td><td>1</td><td>2</td></tr>" in text
    assert '<td class="number">12</td>' in text and "I rest." in text
    assert f"Run broken is not shown completely: {tmp_path / 'broken' / 'config.yaml'}: " in text


@pytest.mark.parametrize("file", ["evaluation/trained/part_000000.parquet", "tasks/test.parquet"])
def test_damaged_conversations_hide_no_other_run(page: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "a" / "benchmarks" / "train.jsonl").write_text("[1]\n{}\n")
    broken = write_small_run(tmp_path / "broken", {"t": 1.0})
    played = [trajectory(turn(0, text="I rest too."), task_id="walk")]
    write_trajectories(broken / "evaluation" / "trained" / "part_000000.parquet", played)
    write_tasks(broken / "tasks" / "test.parquet", [WALK])
    (broken / file).write_bytes(b"PAR1" + b"x" * 100)
    write_runs_page(tmp_path, ["broken", "a"], page)
    text = page.read_text()
    assert f"Run broken is not shown completely: {broken / file}: " in text
    assert "Conversations of a" in text and "Conversations of broken" not in text


@needs_chromium
def test_a_browser_shows_the_conversations_in_frames(page: Path, tmp_path: Path) -> None:
    screenshot = tmp_path / "page.png"
    options = (f"--screenshot={screenshot}", "--window-size=1000,2000")
    agent_colour = (0x00, 0x5E, 0xB9)  # of the first agent, only in a frame
    frame_is_drawn = False
    for seconds in (2, 10, 30):  # a busy machine draws frames late
        document = browse(page.as_uri(), tmp_path / f"profile{seconds}", *options, seconds=seconds)
        assert document.count("<iframe sandbox") == 3
        pixels = (imread(screenshot)[..., :3] * 255).round()
        frame_is_drawn = bool((pixels == agent_colour).all(axis=-1).any())
        if frame_is_drawn:
            break
    assert frame_is_drawn
