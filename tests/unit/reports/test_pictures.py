"""Pictures of games that were played, from the files of a run."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mcore_mas.cli.main import main
from mcore_mas.reports.pages import actions_of, draw_games, drawing, picture
from rollout.environments import ENVS
from rollout.environments.games import GAMES, PUZZLES
from rollout.orchestras import ORCHESTRAS
from rollout.records.files import RecordError, write_tasks, write_trajectories
from rollout.records.trajectory import Task, Trajectory
from rollout.tasks.games import draw_tasks
from tests.support.canned import Canned
from tests.support.casts import make_team
from tests.support.play import collect
from tests.support.scripted_engine import ScriptedEngine

SMALL = {
    "plan_path": {"size": 4},
    "sokoban": {},
    "sudoku": {"size": 4},
    "blocksworld": {"blocks": 4},
}
CELLS = {"plan_path": 16, "sokoban": 36, "sudoku": 16}


def played(task: Task, *replies: str, orchestra: str = "single") -> Trajectory:
    roles = {
        "single": {"player": "player"},
        "game_team": {"tool": "game_tool", "planner": "game_planner"},
    }[orchestra]
    team = make_team(ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0)), roles)
    make = partial(ENVS[task.env], max_turns=5)
    [group] = asyncio.run(
        collect([task], team, make, ORCHESTRAS[orchestra], group_size=1, seed=1, step=0)
    )
    return group.trajectories[0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Task]]:
    """A run of every game, each solved after a reply without actions."""
    tasks = [
        draw_tasks(PUZZLES[game](**options), 3, {"test": 1})[0] for game, options in SMALL.items()
    ]
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks)
    trajectories = [played(task, "no idea", f"I see.\n#### {task.answers[0]}") for task in tasks]
    assert [trajectory.metrics["solved"] for trajectory in trajectories] == [1.0] * len(GAMES)
    file = tmp_path / "evaluation" / "base.parquet"
    write_trajectories(file, trajectories)
    return file, tasks


def boards(path: Path) -> list[ET.Element]:
    return [shape for shape in ET.fromstring(path.read_text()) if shape.tag.endswith("rect")]


def signs(svg: str) -> list[Counter[str]]:
    """What is written in the squares of each board, from left to right."""
    texts = [
        (int(shape.get("x", "")), shape.text)
        for shape in ET.fromstring(svg)
        if shape.tag.endswith("text")
    ]
    lefts = sorted(
        {int(shape.get("x", "")) for shape in ET.fromstring(svg) if shape.tag.endswith("rect")}
    )
    firsts = [
        left for left in lefts if left - 24 not in lefts
    ]  # boards are apart, their squares of 24 pixels are not
    return [
        Counter(sign for x, sign in texts if first < x < until)
        for first, until in zip(firsts, [*firsts[1:], 10**6], strict=True)
    ]


def test_every_solved_game_of_a_file_is_drawn_into_a_folder(run: tuple[Path, list[Task]]) -> None:
    file, tasks = run
    paths = draw_games(file, file.parent / "pictures")
    assert [path.name for path in paths] == [
        f"0_{task.id.replace('/', '_')}_0.svg" for task in tasks
    ]
    for path, task in zip(paths, tasks, strict=True):
        before, still, solved = signs(path.read_text())  # at the start, after nothing, solved
        assert before == still
        if task.env in CELLS:
            assert len(boards(path)) == 3 * CELLS[task.env]
        match task.env:
            case "plan_path":  # the walker stands on the goal in the end
                assert (before["S"], before["G"]) == (solved["S"], 1) == (1, 1)
                assert solved["G"] == 0
            case "sokoban":
                assert before["@"] + before["+"] == solved["@"] + solved["+"] == 1
                assert (
                    before["$"] + before["*"]
                    == solved["*"]
                    == before["."] + before["+"] + before["*"]
                    == 1
                )
            case "sudoku":
                assert 0 < sum(before[digit] for digit in "1234") < 16
                assert solved == dict.fromkeys("1234", 4)
            case "blocksworld":
                assert {block: before[block] for block in "ABCD"} == {
                    block: solved[block] for block in "ABCD"
                }
                assert sum(before[block] for block in "ABCD") == 4


@pytest.mark.parametrize(
    ("env", "prompt", "actions", "counted"),
    [
        (
            "plan_path",
            "S 1 1 G 1 3\nS . G",
            ["R", "R"],
            [{"S": 1, ".": 1, "G": 1}] * 2 + [{"S": 1, ".": 2}],
        ),
        (
            "sokoban",
            "# # # # # #\n# @ _ $ . #\n# # # # # #",
            ["R R"],
            [{"@": 1, "$": 1, ".": 1}, {"@": 1, "*": 1}],
        ),
        (
            "sudoku",
            "1 . 3 4\n3 4 1 .\n. 1 4 3\n4 3 . 1",
            ["1 2 2"],
            [{"1": 4, "3": 4, "4": 4, ".": 4}, {"1": 4, "2": 1, "3": 4, "4": 4, ".": 3}],
        ),
        (
            "blocksworld",
            "now: A B | C\ngoal: C B A",
            ["B C"],
            [{"A": 1, "B": 1, "C": 1, ".": 1}] * 2,
        ),
    ],
)
def test_a_picture_by_hand(
    env: str, prompt: str, actions: list[str], counted: list[dict[str, int]]
) -> None:
    task = Task(id="t", prompt=prompt, answers=(), env=env, source="s", split="train")
    assert signs(picture(task, actions)) == counted


def test_the_command_draws_one(
    run: tuple[Path, list[Task]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, _ = run
    out = file.parent / "two.svg"
    monkeypatch.setattr(
        "sys.argv", ["mcore-mas", "show", str(file), "--index", "2", "--picture", str(out)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out.strip()) == (0, str(out))
    assert len(boards(out)) == 3 * CELLS["sudoku"]


def test_a_program_acts_by_what_it_prints() -> None:
    task = Task(
        id="t",
        prompt="S 1 1 G 1 3\nS . G",
        answers=("R R",),
        env="plan_path",
        source="s",
        split="train",
    )
    replies = [f"```python\n{program}\n```" for program in ("walk()", "lost()", "walk()")]
    team = make_team(
        ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0)), {"player": "game_coder"}
    )
    alone = partial(ORCHESTRAS["single"], tool="program")

    make = partial(ENVS["plan_path"], sandbox=Canned({"walk()": "**Actions List**: R"}))
    [group] = asyncio.run(collect([task], team, make, alone, group_size=1, seed=1, step=0))
    trajectory = group.trajectories[0]
    assert actions_of(trajectory) == ["R", "", "R"]
    assert [board["G"] for board in signs(drawing(task, trajectory) or "")] == [1, 1, 1, 0]


def test_only_games_have_pictures() -> None:
    trajectory = Trajectory(
        id="0/t/0", task_id="t", source="s", sample=0, step=0, turns=(), outcome=None
    )
    task = Task(id="t", prompt="?", answers=("1",), env="math", source="s", split="train")
    assert drawing(task, trajectory) is None
    assert (
        drawing(replace(task, env="sudoku"), trajectory) is None
    )  # a puzzle that nobody could read


def test_the_planner_is_who_acts() -> None:
    task = Task(
        id="t",
        prompt="S 1 1 G 1 3\nS . G",
        answers=("R R",),
        env="plan_path",
        source="s",
        split="train",
    )
    replies = (
        "**Actions List**: L",
        "#### R",
        "**Actions List**: L",
        "no idea",
        "**Actions List**: L",
        "#### R",
    )
    assert actions_of(played(task, *replies, orchestra="game_team")) == ["R", "", "R"]


def test_what_cannot_be_drawn_is_one_line(run: tuple[Path, list[Task]], tmp_path: Path) -> None:
    file, tasks = run
    with pytest.raises(RecordError, match=r"pictures are SVG"):
        draw_games(file, tmp_path / "x.png")
    with pytest.raises(RecordError, match="no trajectory 9; it holds 4"):
        draw_games(file, tmp_path / "x.svg", index=9)
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks[1:])
    with pytest.raises(
        RecordError, match="is not among the run's tasks; pictures are of plan_path"
    ):
        draw_games(file, tmp_path / "all")
    (tmp_path / "tasks" / "test.parquet").unlink()
    (tmp_path / "tasks").rmdir()
    with pytest.raises(RecordError, match="in no run's folder"):
        draw_games(file, tmp_path / "all")
