"""Contracts of the games and of their sources of puzzles."""

from __future__ import annotations

import asyncio
import re
from itertools import combinations, permutations
from random import Random

import pytest
from pydantic import ValidationError

from rollout.base.options import options_model, validate_options
from rollout.environments import ENVS
from rollout.environments.games import GAMES, PUZZLES
from rollout.environments.games.game import GameEnv
from rollout.environments.protocol import Step
from rollout.records.trajectory import Task
from rollout.tasks.generators import GENERATORS
from rollout.tasks.puzzles import draw_puzzle_tasks

SMALL = {
    "plan_path": {"size": 5},
    "sokoban": {},
    "sudoku": {"size": 4},
    "blocksworld": {"blocks": 4},
}
CASES = [
    *SMALL.items(),
    ("sudoku", {"size": 9}),
    ("plan_path", {"size": 10}),
    ("sokoban", {"size": 7, "boxes": 2}),
]
SIZES = {"train": 30, "validation": 4, "test": 4}


def play(task: Task, actions: list[str], max_turns: int = 5) -> list[Step]:
    """Play actions until the game ends; check that previews equal the steps.

    Returns:
        The steps of the environment.
    """
    env = ENVS[task.env](task, max_turns=max_turns)
    assert isinstance(env, GameEnv)
    assert task.prompt in env.reset(task)

    async def run() -> list[Step]:
        steps: list[Step] = []
        for action in actions:
            preview = await env.preview(action)
            step = await env.step(action)
            assert preview == step
            steps.append(step)
            if step.done:
                break
        return steps

    return asyncio.run(run())


def test_every_game_has_rules_an_environment_and_a_generator() -> None:
    assert set(GAMES) == set(PUZZLES) == set(SMALL)
    assert set(GAMES) < set(ENVS)
    assert set(GAMES) < set(GENERATORS)


@pytest.mark.parametrize(("game", "options"), CASES)
def test_the_stored_answer_of_a_task_solves_it(game: str, options: dict[str, int]) -> None:
    for task in draw_puzzle_tasks(PUZZLES[game](**options), 3, {"train": 10}):
        (step,) = play(task, list(task.answers))
        assert step.done
        assert step.metrics["solved"] == 1.0
        assert step.metrics["progress"] == 1.0
        assert step.metrics.get("optimal", 1.0) == 1.0
        assert step.metrics["impossible_actions"] == 0.0
        assert step.metrics["malformed_actions"] == 0.0
        assert play(task, ["no idea"] * 2, max_turns=2)[-1].metrics["solved"] == 0.0


@pytest.mark.parametrize(("game", "options"), CASES)
def test_a_prompt_is_read_back_as_its_state(game: str, options: dict[str, int]) -> None:
    rules = GAMES[game]()
    for task in draw_puzzle_tasks(PUZZLES[game](**options), 4, {"train": 10}):
        state = rules.read(task.prompt)
        assert rules.show(state) == task.prompt
        assert not rules.solved(state)
        assert rules.measure(state)["progress"] < 1.0


@pytest.mark.parametrize("game", GAMES)
def test_the_same_actions_give_the_same_steps(game: str) -> None:
    source = PUZZLES[game](**SMALL[game])
    for task in draw_puzzle_tasks(source, 5, {"train": 8}):
        random = Random(task.id)
        answer = task.answers[0]
        actions = []
        for _ in range(4):
            candidates = ["", "no idea", source.slip(random, answer), answer[:-1]]
            actions.append(random.choice(candidates))
        assert play(task, actions) == play(task, actions)


@pytest.mark.parametrize("game", GAMES)
def test_a_slip_is_a_legal_answer_other_than_the_stored_one(game: str) -> None:
    source = PUZZLES[game](**SMALL[game])
    rules = GAMES[game]()
    for task in draw_puzzle_tasks(source, 6, {"train": 10}):
        wrong = source.slip(Random(task.id), task.answers[0])
        assert wrong != task.answers[0]
        assert rules.play(rules.read(task.prompt), wrong) is not None


@pytest.mark.parametrize("game", GAMES)
def test_a_seed_draws_the_same_different_tasks_every_time(game: str) -> None:
    source = PUZZLES[game](**SMALL[game])
    tasks = draw_puzzle_tasks(source, 7, SIZES)
    assert tasks == draw_puzzle_tasks(source, 7, SIZES)
    assert tasks != draw_puzzle_tasks(source, 8, SIZES)
    assert len({task.id for task in tasks}) == 38
    assert len({task.prompt for task in tasks}) == 38
    assert {task.env for task in tasks} == {game}


def split_key(task: Task) -> str:
    """Return the part of a puzzle that no two splits may share.

    It is the map without start and goal, the walls, or the puzzle up to a permutation of its digits.
    """
    if task.env == "plan_path":
        return task.prompt.partition("\n")[2].replace("S", ".").replace("G", ".")
    if task.env == "sokoban":
        return "".join("#" if sign == "#" else "_" for sign in task.prompt.split())
    if task.env == "sudoku":
        return min(
            task.prompt.translate(str.maketrans("1234", "".join(digits)))
            for digits in permutations("1234")
        )
    return task.prompt


@pytest.mark.parametrize("game", GAMES)
def test_no_split_of_any_seed_has_a_puzzle_of_another_split(game: str) -> None:
    keys: dict[str, set[str]] = {split: set() for split in SIZES}
    for seed in (1, 2, 3):
        for task in draw_puzzle_tasks(PUZZLES[game](**SMALL[game]), seed, SIZES):
            keys[task.split].add(split_key(task))
    assert all(keys.values())
    for first, second in combinations(SIZES, 2):
        assert not keys[first] & keys[second]


def all_small_sudokus() -> list[str]:
    """Return all solved sudokus of 4 x 4 digits, row by row."""
    grids: list[list[tuple[str, ...]]] = [[]]
    for _ in range(4):  # append every row that repeats no digit in a column
        longer_grids = []
        for rows in grids:
            for row in permutations("1234"):
                columns = zip(*rows, row, strict=True)
                if all(len(set(column)) == len(column) for column in columns):
                    longer_grids.append([*rows, row])
        grids = longer_grids
    boxes = [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]
    texts = ["".join("".join(row) for row in rows) for rows in grids]
    return [text for text in texts if all(len({text[i] for i in box}) == 4 for box in boxes)]


def test_four_by_four_sudokus_have_one_solution() -> None:
    grids = all_small_sudokus()
    assert len(grids) == 288
    for task in draw_puzzle_tasks(PUZZLES["sudoku"](size=4, givens=6), 1, {"train": 30}):
        puzzle = task.prompt.replace("\n", "").replace(" ", "")
        assert len(puzzle) - puzzle.count(".") == 6
        # An empty cell of the puzzle is a dot, which matches every digit.
        (solution,) = (grid for grid in grids if re.fullmatch(puzzle, grid))
        assert task.answers[0].replace(", ", "") == solution


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("blocksworld", {"blocks": 2}, "blocksworld_2: 99 test tasks asked for, but there are"),
        ("blocksworld", {"blocks": 3}, "blocksworld_3: 99 test tasks asked for, but there are"),
        ("plan_path", {"size": 2, "obstacles": 0.0}, "20000 draws in a row gave no new one"),
    ],
)
def test_more_puzzles_than_exist_are_refused(
    game: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        draw_puzzle_tasks(PUZZLES[game](**options), 1, {"test": 99})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("plan_path", {"size": 1}, "Input should be greater than or equal to 2"),
        ("plan_path", {"size": "tiny"}, "Input should be a valid integer"),
        ("plan_path", {"obstacles": 1}, "Input should be less than 1"),
        ("sokoban", {"boxes": 0}, "Input should be greater than 0"),
        ("sokoban", {"turn": 2}, "Input should be less than or equal to 1"),
        ("sudoku", {"size": 6}, "Input should be 4 or 9"),
        (
            "sudoku",
            {"givens": 3},
            "Value error, expected an integer from 4 to 15 for size 4, or null",
        ),
        (
            "sudoku",
            {"size": 9, "givens": 16},
            "Value error, expected an integer from 17 to 80 for size 9, or null",
        ),
        ("blocksworld", {"blocks": 9}, "Input should be less than or equal to 6"),
    ],
)
def test_options_are_checked(game: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        validate_options(game, options_model(PUZZLES[game]), options)
    assert [error["msg"] for error in refusal.value.errors()] == [message]


def test_the_puzzles_of_few_blocks_are_counted() -> None:
    """2, 3 and 4 blocks have 3, 13 and 73 stackings (OEIS A000262); a puzzle is a pair of two of them."""
    assert len(PUZZLES["blocksworld"](blocks=3).all_puzzles() or ()) == 13 * 12
    assert len(PUZZLES["blocksworld"](blocks=4).all_puzzles() or ()) == 73 * 72
    assert len(PUZZLES["blocksworld"](blocks=2).all_puzzles() or ()) == 3 * 2
