"""Pictures of games that were played, from the files of a run."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest

from mcore_mas.cli import main
from mcore_mas.pictures import actions_of, draw
from rollout.collect import collect
from rollout.engines.scripted import ScriptedEngine
from rollout.envs import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.records import RecordError, Task, Trajectory, write_tasks, write_trajectories
from rollout.tasks.games import SOURCES
from rollout.tasks.games.source import draw_tasks
from tests.support.casts import make_team

SMALL = {"plan_path": {"size": 4}, "sokoban": {}, "sudoku": {"size": 4}}
CELLS = {"plan_path": 16, "sokoban": 36, "sudoku": 16}


def played(task: Task, *replies: str, orchestra: str = "single") -> Trajectory:
    roles = {"single": {"player": "player"}, "game_team": {"tool": "game_tool", "planner": "game_planner"}}[orchestra]
    team = make_team(ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0)), roles)
    make = partial(ENVS[task.env], max_turns=5)
    [group] = asyncio.run(collect([task], team, make, ORCHESTRAS[orchestra], group_size=1, seed=1, step=0))
    return group.trajectories[0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Task]]:
    """A run of three games, each solved after a reply without actions."""
    tasks = [draw_tasks(SOURCES[game](**options), 3, {"test": 1})[0] for game, options in SMALL.items()]
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks)
    trajectories = [played(task, "no idea", f"I see.\n#### {task.answers[0]}") for task in tasks]
    assert [trajectory.metrics["solved"] for trajectory in trajectories] == [1.0, 1.0, 1.0]
    file = tmp_path / "evaluation" / "base.parquet"
    write_trajectories(file, trajectories)
    return file, tasks


def boards(path: Path) -> list[ET.Element]:
    return [shape for shape in ET.fromstring(path.read_text()) if shape.tag.endswith("rect")]


def test_every_solved_game_of_a_file_is_drawn_into_a_folder(run: tuple[Path, list[Task]]) -> None:
    file, tasks = run
    paths = draw(file, file.parent / "pictures")
    assert [path.name for path in paths] == [f"0_{task.id.replace('/', '_')}_0.svg" for task in tasks]
    for path, task in zip(paths, tasks, strict=True):
        assert len(boards(path)) == 3 * CELLS[task.env]  # at the start, after nothing, solved


def test_the_command_draws_one(
    run: tuple[Path, list[Task]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = run
    out = file.parent / "two.svg"
    monkeypatch.setattr("sys.argv", ["mcore-mas", "show", str(file), "--index", "2", "--picture", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out.strip()) == (0, str(out))
    assert len(boards(out)) == 3 * CELLS["sudoku"]


def test_the_planner_is_who_acts() -> None:
    task = Task(id="t", prompt="S 1 1 G 1 3\nS . G", answers=("R R",), env="plan_path", source="s", split="train")
    replies = ("**Actions List**: L", "#### R", "**Actions List**: L", "no idea", "**Actions List**: L", "#### R")
    assert actions_of(played(task, *replies, orchestra="game_team")) == ["R", "", "R"]


def test_what_cannot_be_drawn_is_one_line(run: tuple[Path, list[Task]], tmp_path: Path) -> None:
    file, tasks = run
    with pytest.raises(RecordError, match=r"pictures are SVG"):
        draw(file, tmp_path / "x.png")
    with pytest.raises(RecordError, match="no trajectory 9; it holds 3"):
        draw(file, tmp_path / "x.svg", index=9)
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks[1:])
    with pytest.raises(RecordError, match="is not among the run's tasks; pictures are of plan_path"):
        draw(file, tmp_path / "all")
    (tmp_path / "tasks" / "test.parquet").unlink()
    (tmp_path / "tasks").rmdir()
    with pytest.raises(RecordError, match="in no run's folder"):
        draw(file, tmp_path / "all")
