"""Pictures of games, from the files of a run."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mcore_mas.cli.main import main
from mcore_mas.reports.game_pictures import (
    draw_boards,
    draw_trajectory,
    game_actions,
    write_game_pictures,
)
from rollout.base.errors import EngineError
from rollout.environments import ENVS
from rollout.environments.games import GAMES, PUZZLES
from rollout.orchestras import ORCHESTRAS
from rollout.records.files import RecordError, write_tasks, write_trajectories
from rollout.records.trajectory import Task, Trajectory
from rollout.tasks.puzzles import draw_puzzle_tasks
from tests.support.canned import Canned
from tests.support.casts import make_team
from tests.support.play import collect
from tests.support.played_games import play_game
from tests.support.scripted_engine import ScriptedEngine

PUZZLE_OPTIONS = {
    "plan_path": {"size": 4},
    "sokoban": {},
    "sudoku": {"size": 4},
    "blocksworld": {"blocks": 4},
}
SQUARES = {"plan_path": 16, "sokoban": 36, "sudoku": 16}  # of a board
WALK = Task(
    id="t",
    prompt="S 1 1 G 1 3\nS . G",
    answers=("R R",),
    env="plan_path",
    source="s",
    split="train",
)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Task]]:
    """Return a file with a trajectory of each game, and the games' tasks.

    Each game is solved after a reply without actions.
    """
    tasks = [
        draw_puzzle_tasks(PUZZLES[game](**options), 3, {"test": 1})[0]
        for game, options in PUZZLE_OPTIONS.items()
    ]
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks)
    trajectories = [play_game(task, "no idea", f"I see.\n#### {task.answers[0]}") for task in tasks]
    assert [played.metrics["solved"] for played in trajectories] == [1.0] * len(GAMES)
    file = tmp_path / "evaluation" / "base.parquet"
    write_trajectories(file, trajectories)
    return file, tasks


def shapes_of(svg: str, tag: str) -> list[ElementTree.Element]:
    return [shape for shape in ElementTree.fromstring(svg) if shape.tag.endswith(tag)]


def signs_of_boards(svg: str) -> list[Counter[str]]:
    """Count the signs in the squares of each board, from left to right."""
    lefts = sorted({int(shape.get("x", "")) for shape in shapes_of(svg, "rect")})
    # The squares of a board are 24 pixels apart, and the boards further.
    board_lefts = [left for left in lefts if left - 24 not in lefts]
    board_rights = [*board_lefts[1:], 10**6]
    texts = [(int(shape.get("x", "")), str(shape.text)) for shape in shapes_of(svg, "text")]
    return [
        Counter(text for x, text in texts if left < x < right)
        for left, right in zip(board_lefts, board_rights, strict=True)
    ]


def test_every_game_of_a_file_is_drawn_into_a_folder(run: tuple[Path, list[Task]]) -> None:
    file, tasks = run
    paths = write_game_pictures(file, file.parent / "pictures")
    assert [path.name for path in paths] == [
        f"0_{task.id.replace('/', '_')}_0.svg" for task in tasks
    ]
    for path, task in zip(paths, tasks, strict=True):
        svg = path.read_text()
        first, second, last = signs_of_boards(svg)
        assert first == second  # the first reply has no actions
        if task.env in SQUARES:
            assert len(shapes_of(svg, "rect")) == 3 * SQUARES[task.env]
        if task.env == "plan_path":  # at the end the walker is on the goal
            assert (first["S"], first["G"]) == (1, 1)
            assert (last["S"], last["G"]) == (1, 0)
        elif task.env == "sokoban":  # at the end the box is on its place
            assert first["@"] + first["+"] == last["@"] + last["+"] == 1
            assert first["$"] + first["*"] == first["."] + first["+"] + first["*"] == 1
            assert last["*"] == 1
        elif task.env == "sudoku":
            assert 0 < sum(first[digit] for digit in "1234") < 16
            assert last == dict.fromkeys("1234", 4)
        else:
            assert {block: first[block] for block in "ABCD"} == {
                block: last[block] for block in "ABCD"
            }
            assert sum(first[block] for block in "ABCD") == 4


def test_an_existing_folder_may_have_a_dot_in_its_name(run: tuple[Path, list[Task]]) -> None:
    file, tasks = run
    folder = file.parent / "boards.v2"
    folder.mkdir()
    assert len(write_game_pictures(file, folder)) == len(tasks)


def test_ids_that_differ_in_replaced_characters_have_a_file_each(tmp_path: Path) -> None:
    """Draw tasks "a/b" and "a_b": the first is solved in one step, the second in two."""
    tasks = [replace(WALK, id="a/b"), replace(WALK, id="a_b")]
    write_tasks(tmp_path / "tasks" / "train.parquet", tasks)
    file = tmp_path / "base.parquet"
    trajectories = [play_game(tasks[0], "#### R R"), play_game(tasks[1], "no idea", "#### R R")]
    write_trajectories(file, trajectories)
    paths = write_game_pictures(file, tmp_path / "pictures")
    assert [path.name for path in paths] == ["0_a_b_0.svg", "0_a_b_0-2.svg"]
    # Each board has three squares: one before the first step, and one after every step.
    squares = [len(shapes_of(path.read_text(), "rect")) for path in paths]
    assert squares == [2 * 3, 3 * 3]


@pytest.mark.parametrize(
    ("env", "prompt", "actions", "signs"),
    [
        (
            "plan_path",
            "S 1 1 G 1 3\nS . G",
            ["R", "R"],
            [{"S": 1, ".": 1, "G": 1}, {"S": 1, ".": 1, "G": 1}, {"S": 1, ".": 2}],
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
            [{"A": 1, "B": 1, "C": 1, ".": 1}, {"A": 1, "B": 1, "C": 1, ".": 1}],
        ),
    ],
)
def test_boards_by_hand(
    env: str, prompt: str, actions: list[str], signs: list[dict[str, int]]
) -> None:
    task = Task(id="t", prompt=prompt, answers=(), env=env, source="s", split="train")
    assert signs_of_boards(draw_boards(task, actions)) == signs


def test_the_command_draws_one_trajectory(
    run: tuple[Path, list[Task]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, _ = run
    out = file.parent / "two.svg"
    arguments = ["mcore-mas", "show", str(file), "--index", "3", "--picture", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert len(shapes_of(out.read_text(), "rect")) == 3 * SQUARES["sudoku"]


def test_a_program_acts_by_its_output() -> None:
    replies = [f"```python\n{program}\n```" for program in ("walk()", "lost()", "walk()")]
    engine = ScriptedEngine(lambda prompt, call: (*replies[call].encode(), 0))
    team = make_team(engine, {"player": "game_coder"})
    orchestra = partial(ORCHESTRAS["single"], actions_from="program")
    make_env = partial(ENVS["plan_path"], sandbox=Canned({"walk()": "**Actions List**: R"}))
    [group] = asyncio.run(collect([WALK], team, make_env, orchestra, group_size=1, seed=1, step=0))
    trajectory = group.trajectories[0]
    assert game_actions(trajectory) == ["R", "", "R"]
    boards = signs_of_boards(draw_trajectory(WALK, trajectory) or "")
    assert [board["G"] for board in boards] == [1, 1, 1, 0]


def test_the_planner_decides_on_the_actions() -> None:
    replies = (
        "**Actions List**: L",
        "#### R",
        "**Actions List**: L",
        "no idea",
        "**Actions List**: L",
        "#### R",
    )
    assert game_actions(play_game(WALK, *replies, orchestra="game_team")) == ["R", "", "R"]


def test_a_round_without_a_step_has_no_board() -> None:
    """The engine fails after the tool's second turn, before the second step."""

    def reply(prompt: tuple[int, ...], call: int) -> tuple[int, ...]:
        if call == 3:
            raise EngineError("gone")
        return (*("#### R" if call == 1 else "**Actions List**: R").encode(), 0)

    team = make_team(ScriptedEngine(reply), {"tool": "game_tool", "planner": "game_planner"})
    orchestra = ORCHESTRAS["game_team"]
    make_env = ENVS["plan_path"]
    [group] = asyncio.run(collect([WALK], team, make_env, orchestra, group_size=1, seed=1, step=0))
    trajectory = group.trajectories[0]
    assert [turn.agent for turn in trajectory.turns] == ["tool", "planner", "tool"]
    assert game_actions(trajectory) == ["R"]


def test_only_games_with_a_readable_puzzle_have_pictures() -> None:
    trajectory = Trajectory(id="0/t/0", task_id="t", source="s", sample=0, step=0, turns=())
    task = Task(id="t", prompt="?", answers=("1",), env="math", source="s", split="train")
    assert draw_trajectory(task, trajectory) is None
    assert draw_trajectory(replace(task, env="sudoku"), trajectory) is None


def test_a_file_that_cannot_be_drawn_is_one_line(
    run: tuple[Path, list[Task]], tmp_path: Path
) -> None:
    file, tasks = run
    with pytest.raises(RecordError, match="pictures are SVG"):
        write_game_pictures(file, tmp_path / "x.png")
    with pytest.raises(RecordError, match="no trajectory 10; it holds 4"):
        write_game_pictures(file, tmp_path / "x.svg", index=9)
    write_tasks(tmp_path / "tasks" / "test.parquet", tasks[1:])
    with pytest.raises(RecordError, match="not among the run's tasks; pictures are of plan_path"):
        write_game_pictures(file, tmp_path / "all")
    write_tasks(tmp_path / "tasks" / "test.parquet", [replace(tasks[0], env="math"), *tasks[1:]])
    with pytest.raises(RecordError, match="is no puzzle of a game; pictures are of plan_path"):
        write_game_pictures(file, tmp_path / "all")
