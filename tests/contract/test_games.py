"""What every game and its source of puzzles promise."""

from __future__ import annotations

import asyncio
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


def played(task: Task, actions: list[str], max_turns: int = 5) -> list[Step]:
    env = ENVS[task.env](task, max_turns=max_turns)
    assert isinstance(env, GameEnv)
    assert task.prompt in env.reset(task)

    async def steps() -> list[Step]:
        found: list[Step] = []
        for text in actions:
            if found and found[-1].done:
                break
            ahead = await env.preview(text)
            found.append(await env.step(text))
            assert ahead == found[-1]
        return found

    return asyncio.run(steps())


def test_every_game_has_rules_an_environment_and_a_generator() -> None:
    assert set(GAMES) == set(PUZZLES) == set(SMALL)
    assert set(GAMES) < set(ENVS)
    assert set(GAMES) < set(GENERATORS)


@pytest.mark.parametrize(("game", "options"), CASES)
def test_a_stored_solution_solves(game: str, options: dict[str, int]) -> None:
    for task in draw_puzzle_tasks(PUZZLES[game](**options), 3, {"train": 10}):
        [step] = played(task, list(task.answers))
        assert step.done
        assert step.metrics["solved"] == step.metrics["progress"] == 1.0
        assert step.metrics.get("optimal", 1.0) == 1.0
        assert step.metrics["impossible_actions"] == step.metrics["malformed_actions"] == 0.0
        assert played(task, ["no idea"] * 2, max_turns=2)[-1].metrics["solved"] == 0.0


@pytest.mark.parametrize(("game", "options"), CASES)
def test_what_is_shown_is_what_is_read(game: str, options: dict[str, int]) -> None:
    rules = GAMES[game]()
    for task in draw_puzzle_tasks(PUZZLES[game](**options), 4, {"train": 10}):
        state = rules.read(task.prompt)
        assert rules.show(state) == task.prompt
        assert not rules.solved(state)
        assert rules.measure(state)["progress"] < 1.0


@pytest.mark.parametrize("game", GAMES)
def test_playing_the_same_actions_again_is_the_same(game: str) -> None:
    source = PUZZLES[game](**SMALL[game])
    for task in draw_puzzle_tasks(source, 5, {"train": 8}):
        random = Random(task.id)
        actions = [
            random.choice(
                ["", "no idea", source.slip(random, task.answers[0]), task.answers[0][:-1]]
            )
            for _ in range(4)
        ]
        assert played(task, actions) == played(task, actions)


@pytest.mark.parametrize("game", GAMES)
def test_a_slip_is_legal_and_differs(game: str) -> None:
    source, rules = PUZZLES[game](**SMALL[game]), GAMES[game]()
    for task in draw_puzzle_tasks(source, 6, {"train": 10}):
        wrong = source.slip(Random(task.id), task.answers[0])
        assert wrong != task.answers[0]
        assert rules.play(rules.read(task.prompt), wrong) is not None


@pytest.mark.parametrize("game", GAMES)
def test_the_same_seed_draws_the_same_tasks_none_twice(game: str) -> None:
    source = PUZZLES[game](**SMALL[game])
    tasks = draw_puzzle_tasks(source, 7, SIZES)
    assert tasks == draw_puzzle_tasks(source, 7, SIZES)
    assert tasks != draw_puzzle_tasks(source, 8, SIZES)
    assert len({task.id for task in tasks}) == len({task.prompt for task in tasks}) == 38
    assert {task.env for task in tasks} == {game}


def learnable(task: Task) -> str:
    """What a split may not share with another: the map, the walls, the puzzle up to the names of its digits."""
    if task.env == "plan_path":
        return task.prompt.partition("\n")[2].replace("S", ".").replace("G", ".")
    if task.env == "sokoban":
        return "".join("#" if sign == "#" else "_" for sign in task.prompt.split())
    if task.env == "sudoku":
        return min(
            task.prompt.translate(str.maketrans("1234", "".join(names)))
            for names in permutations("1234")
        )
    return task.prompt


@pytest.mark.parametrize("game", GAMES)
def test_no_split_of_any_seed_has_a_puzzle_of_another_split(game: str) -> None:
    tasks = [
        task
        for seed in (1, 2, 3)
        for task in draw_puzzle_tasks(PUZZLES[game](**SMALL[game]), seed, SIZES)
    ]
    seen = {split: {learnable(task) for task in tasks if task.split == split} for split in SIZES}
    assert all(seen.values())
    for one, other in combinations(SIZES, 2):
        assert not seen[one] & seen[other]


def test_four_by_four_sudokus_have_one_solution() -> None:
    lines = list(permutations("1234"))
    boxes = [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]
    grids = ["".join("".join(row) for row in rows) for rows in _latin(lines)]
    grids = [grid for grid in grids if all(len({grid[i] for i in box}) == 4 for box in boxes)]
    assert len(grids) == 288
    for task in draw_puzzle_tasks(PUZZLES["sudoku"](size=4, givens=6), 1, {"train": 30}):
        puzzle = task.prompt.replace("\n", "").replace(" ", "")
        assert len(puzzle) - puzzle.count(".") == 6
        matching = [
            g
            for g in grids
            if all(sign in (".", digit) for sign, digit in zip(puzzle, g, strict=True))
        ]
        assert len(matching) == 1
        assert task.answers[0].replace(", ", "") == matching[0]


def _latin(lines: list[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    found: list[list[tuple[str, ...]]] = [[]]
    for _ in range(4):
        found = [
            [*rows, line]
            for rows in found
            for line in lines
            if all(a != b for row in rows for a, b in zip(row, line, strict=True))
        ]
    return found


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("blocksworld", {"blocks": 2}, "blocksworld_2: 99 test tasks asked for, but there are"),
        ("blocksworld", {"blocks": 3}, "blocksworld_3: 99 test tasks asked for, but there are"),
        ("plan_path", {"size": 2, "obstacles": 0.0}, "20000 draws after the .* found no other"),
    ],
)
def test_more_puzzles_than_there_are_cannot_be_had(
    game: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        draw_puzzle_tasks(PUZZLES[game](**options), 1, {"test": 99})
    assert "\n" not in str(caught.value)


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
    with pytest.raises(ValidationError) as refused:
        validate_options(game, options_model(PUZZLES[game]), options)
    assert [error["msg"] for error in refused.value.errors()] == [message]


def test_small_games_are_counted() -> None:
    """3 and 4 blocks have 13 and 73 stackings (OEIS A000262)."""
    assert len(PUZZLES["blocksworld"](blocks=3).everything() or ()) == 13 * 12
    assert len(PUZZLES["blocksworld"](blocks=4).everything() or ()) == 73 * 72
    assert len(PUZZLES["blocksworld"](blocks=2).everything() or ()) == 3 * 2
