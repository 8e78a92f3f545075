"""Rules of the games: rewards computed by hand, lists of actions, and invalid puzzles."""

from __future__ import annotations

import asyncio
from itertools import product
from xml.etree import ElementTree

import pytest

from mcore_mas.reports.game_pictures import draw_boards
from rollout.base.errors import EnvError
from rollout.environments import ENVS
from rollout.environments.games import GAMES
from rollout.environments.games.game import BadPuzzle, parse_actions, parse_letters
from rollout.environments.games.sudoku import solutions
from rollout.environments.protocol import Step
from rollout.records.trajectory import Task

PATH = "S 1 1 G 3 3\nS . .\n# . #\n. . G"
ROOM = "# # # # # #\n# @ _ $ . #\n# # # # # #"
ROOM_WITH_TWO_BOXES = "# # # # # # #\n# @ * _ $ . #\n# # # # # # #"
SUDOKU = "1 . 3 4\n3 4 1 .\n. 1 4 3\n4 3 . 1"
SUDOKU_SOLUTION = "1234, 3412, 2143, 4321"
BLOCKS = "now: A B | C\ngoal: C B A"
BLOCKS_SOLUTION = "B C, A B"


def make_task(env: str, puzzle: str) -> Task:
    return Task(id="t", prompt=puzzle, answers=(), env=env, source=env, split="train")


def play(env: str, puzzle: str, *actions: str, max_turns: int = 9, **rewards: float) -> list[Step]:
    """Play a puzzle with one list of actions in each step; return the steps.

    Args:
        env: name of the game.
        puzzle: first state of the puzzle.
        actions: lists of actions.
        max_turns: maximum number of steps.
        rewards: rewards of the game that are not the default.
    """
    task = make_task(env, puzzle)
    world = ENVS[env](task, max_turns=max_turns, rewards=GAMES[env](**rewards))
    world.reset(task)

    async def steps() -> list[Step]:
        return [await world.step(text) for text in actions]

    return asyncio.run(steps())


def last_reward(
    env: str, puzzle: str, *actions: str, max_turns: int = 9, **rewards: float
) -> float:
    """Return the reward of the last list of actions."""
    steps = play(env, puzzle, *actions, max_turns=max_turns, **rewards)
    return steps[-1].reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("R, R, D", ["R", "R", "D"]),
        ('["R", "R", "D"]', ["R", "R", "D"]),
        ("['R', 'R']", ["R", "R"]),
        ("1 2 4, 2 1 3", ["1 2 4", "2 1 3"]),
        ("[[1, 2, 4], [2, 1, 3]]", ["1 2 4", "2 1 3"]),
        ("[(1, 2, 4), (2, 1, 3)]", ["1 2 4", "2 1 3"]),
        ("[1, 2, 4], [2, 1, 3]", ["1 2 4", "2 1 3"]),
        ("[[1, 2, 4]]", ["1 2 4"]),
        ("[1, 2, 4]", ["1", "2", "4"]),
        ("", []),
        ("[]", []),
        ("[R, R", []),
        ("R,, D", []),
        ("[1, 2] and [3]", []),
        ("R, " * 1000 + "R", []),
    ],
)
def test_a_list_of_actions_may_be_written_in_several_ways(text: str, expected: list[str]) -> None:
    assert parse_actions(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("R R, D", ["R", "R", "D"]), ("RRD", []), ("R, X", []), ("r", [])]
)
def test_letters_need_no_commas(text: str, expected: list[str]) -> None:
    assert parse_letters(text, "UDLR") == expected


def test_plan_path_pays_the_shortest_path() -> None:
    [step] = play("plan_path", PATH, "R D D R")
    # distances 4 3 2 1 0: shaping 1.03 + 1.02 + 1.01 + 1; four steps of -0.01; goal 1, shortest 0.5
    assert step.reward == pytest.approx(4.06 - 0.04 + 1.5)
    assert step.done
    assert step.metrics == {
        "solved": 1.0,
        "progress": 1.0,
        "optimal": 1.0,
        "impossible_actions": 0.0,
        "malformed_actions": 0.0,
    }


def test_plan_path_pays_less_for_a_longer_path() -> None:
    # distances 4 3 2 3 2 1 0: shaping 1.03 + 1.02 - 0.97 + 1.02 + 1.01 + 1; six steps of -0.01
    assert last_reward("plan_path", PATH, "R R L D D R") == pytest.approx(4.11 - 0.06 + 1)


def test_plan_path_counts_steps_into_walls() -> None:
    [step] = play("plan_path", PATH, "L, D")
    assert step.reward == pytest.approx(2 * (-0.1 + 4 - 0.99 * 4))
    assert step.observation == f"{PATH}\nImpossible actions: 2."
    assert step.metrics["impossible_actions"] == 2
    assert not step.done


def test_plan_path_continues_from_the_last_cell_and_ends_at_the_goal() -> None:
    first, second = play("plan_path", PATH, "R D", "D R U U U")
    assert first.observation == "S 2 2 G 3 3\n. . .\n# S #\n. . G"
    assert first.metrics["progress"] == 0.5
    # The actions after the goal are ignored.
    assert second.reward == pytest.approx(1.01 + 1 - 0.02 + 1.5)
    assert second.metrics["optimal"] == 1.0


def test_plan_path_is_lost_after_the_last_turn() -> None:
    [step] = play("plan_path", PATH, "R", max_turns=1)
    assert step.reward == pytest.approx(-0.01 + 1.03 - 1)
    assert step.done
    assert step.metrics["solved"] == 0.0
    assert step.metrics["progress"] == 0.25


def test_plan_path_is_lost_after_the_last_move() -> None:
    [step] = play("plan_path", PATH, "R R L D", max_moves=2)
    assert step.reward == pytest.approx(1.03 + 1.02 - 0.02 - 1)
    assert step.done


def test_a_malformed_list_of_actions_takes_a_turn() -> None:
    first, second = play("plan_path", PATH, "go right", "", max_turns=2)
    assert first.reward == -1.0
    assert not first.done
    assert first.observation == f"{PATH}\nNo list of actions was given."
    assert second.reward == -2.0  # the game is lost, too
    assert second.done
    assert second.metrics["malformed_actions"] == 2.0


def test_sokoban_pays_a_box_that_is_pushed_to_its_goal() -> None:
    # a step without a push: -0.01 + 0.1 (1 - 0.99); the push: -0.01 + 1 + 0.1 (1 - 0) + 10
    assert last_reward("sokoban", ROOM, "R R") == pytest.approx(-0.009 + 11.09)


def test_sokoban_charges_a_step_into_a_wall() -> None:
    reward_of_step = -0.05 + 0.1 * 0.01
    assert last_reward("sokoban", ROOM, "L") == pytest.approx(reward_of_step)
    # with one turn the game is lost, too
    assert last_reward("sokoban", ROOM, "L", max_turns=1) == pytest.approx(reward_of_step - 5)


def test_sokoban_charges_a_box_that_is_pushed_off_its_goal() -> None:
    [step] = play("sokoban", ROOM_WITH_TWO_BOXES, "R")
    assert step.reward == pytest.approx(-0.01 - 0.5 + 0.1 * (1 - 0.99 * 2))
    assert step.observation == "# # # # # # #\n# _ + $ $ . #\n# # # # # # #"
    assert step.metrics["progress"] == 0.0


def test_sokoban_cannot_push_two_boxes_in_a_row() -> None:
    _, second = play("sokoban", ROOM_WITH_TWO_BOXES, "R", "R")
    assert second.metrics["impossible_actions"] == 1


def test_sokoban_finds_a_solution() -> None:
    game = GAMES["sokoban"]()
    assert game.solve(game.read(ROOM)) == "R R"


@pytest.mark.parametrize(
    ("actions", "cost"),
    [
        (SUDOKU_SOLUTION, 0.01),
        ("[[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]", 0.01),
        ("1 2 2, 2 4 2, 3 1 2, 4 3 2", 4 * 0.01),
    ],
    ids=["rows", "JSON rows", "cells"],
)
def test_sudoku_may_be_solved_by_rows_or_cells(actions: str, cost: float) -> None:
    [step] = play("sudoku", SUDOKU, actions)
    # solved 2, and 0.5 because each cell was written once
    assert step.reward == pytest.approx(-cost + 2 + 0.5)
    assert step.done
    assert step.metrics["solved"] == 1.0


def test_sudoku_pays_a_right_cell() -> None:
    [step] = play("sudoku", SUDOKU, "1 2 2")
    # one of 16 cells; its row, column and box have one digit more
    assert step.reward == pytest.approx(-0.01 + 0.5 / 16 + 0.02 * 3)
    assert step.metrics["progress"] == 0.25


def test_sudoku_charges_a_digit_that_repeats() -> None:
    wrong, solved = play("sudoku", SUDOKU, "1 2 3", SUDOKU_SOLUTION)
    # 3 is then twice in its row, column and box, which loses two different digits in each
    assert wrong.reward == pytest.approx(-0.01 + 0.5 / 16 - 0.02 * 6 - 0.5)
    # no bonus, because a cell was written twice
    assert solved.reward == pytest.approx(-0.01 + 2)


def test_sudoku_does_not_change_a_given_cell() -> None:
    [step] = play("sudoku", SUDOKU, "1 1 2, 1 2 2")
    assert step.reward == pytest.approx(-0.02 - 0.5)
    assert step.observation == f"{SUDOKU}\nImpossible actions: 1."


def test_sudoku_may_have_several_solutions() -> None:
    puzzle = "\n".join([". . . ."] * 4)
    game = GAMES["sudoku"]()
    stored_solution = game.read(puzzle).solution
    other_solution = "4321, 2143, 3412, 1234"
    assert stored_solution[0] == 1  # so the other solution differs from it

    [step] = play("sudoku", puzzle, other_solution)
    assert step.metrics["solved"] == 1.0
    assert step.metrics["progress"] == 1.0


@pytest.mark.parametrize("actions", ["1234", "1 2 5", "1 0 2", "1 2", "1235, 3412, 2143, 4321"])
def test_sudoku_refuses_other_digits_and_shapes(actions: str) -> None:
    assert last_reward("sudoku", SUDOKU, actions) == -1.0


def test_the_grid_of_four_has_288_solutions() -> None:
    assert sum(1 for _ in solutions((0,) * 16)) == 288


@pytest.mark.parametrize(
    ("actions", "optimal"), [(BLOCKS_SOLUTION, 1.0), ("B table, B C, A B", 0.0)]
)
def test_blocksworld_pays_a_solution_of_any_length(actions: str, optimal: float) -> None:
    [step] = play("blocksworld", BLOCKS, actions)
    assert step.reward == 1.0
    assert step.done
    assert step.metrics["solved"] == 1.0
    assert step.metrics["optimal"] == optimal


def test_blocksworld_does_not_move_a_covered_block() -> None:
    [step] = play("blocksworld", BLOCKS, "A C, B C")  # B stands on A
    assert step.observation == "now: A | C B\ngoal: C B A\nImpossible actions: 1."
    assert step.metrics["progress"] == pytest.approx(2 / 3)
    assert step.reward == 0.0


def test_blocksworld_refuses_a_move_without_a_target() -> None:
    assert last_reward("blocksworld", BLOCKS, "B") == -1.0


def test_the_rewards_of_a_game_are_options() -> None:
    assert last_reward("blocksworld", BLOCKS, BLOCKS_SOLUTION, solved_reward=3.0) == 3.0


def test_no_path_is_shorter_than_the_solution() -> None:
    game = GAMES["plan_path"]()
    state = game.read("S 1 1 G 1 3\nS # G\n. # .\n. . .")
    assert game.solve(state) == "D D R R U U"
    for length in range(1, 6):
        for moves in product("UDLR", repeat=length):
            played = game.play(state, " ".join(moves))
            assert played is not None
            assert not game.solved(played.state)


@pytest.mark.parametrize(
    ("env", "puzzle", "message"),
    [
        ("plan_path", "S 1 1 G 1 2\nS .", "one S and one G"),
        ("plan_path", "S 1 1 G 1 3\nS # G", "no way"),
        ("plan_path", "S 1 1 G 1 2\nG S", "the first line is .*; expected 'S 1 2 G 1 1'"),
        # Without the first line, the first row of the grid would be lost.
        ("plan_path", "# # #\nS . G", "the first line is '# # #'; expected 'S 1 1 G 1 3'"),
        ("plan_path", "x\nS G\n.", "all of one length"),
        ("plan_path", "x\nS G ?", r"unknown sign '\?'"),
        (
            "sokoban",
            "# # #\n# @ #\n# # #",
            "1 players, 0 boxes, 0 goals; expected .* at least one box",
        ),
        ("sokoban", "@ $ .", "walls all around"),
        (
            "sudoku",
            "1 . 3\n. . .\n. . .",
            "3 rows of 3 cells with digits up to 3; expected 4 rows of 4",
        ),
        (
            "sudoku",
            "7 . . .\n. . . .\n. . . .\n. . . .",
            "4 rows of 4 cells with digits up to 7; expected 4 rows of 4 with digits up to 4",
        ),
        ("sudoku", "1 1 . .\n. . . .\n. . . .\n. . . .", "no solution"),
        ("blocksworld", "now: A B\ngoal: A", "with the same blocks"),
        ("blocksworld", "now: A | A\ngoal: A", "with the same blocks"),
        ("blocksworld", "A on B", "with the same blocks"),
    ],
)
def test_an_invalid_puzzle_is_refused(env: str, puzzle: str, message: str) -> None:
    with pytest.raises(BadPuzzle, match=message):
        GAMES[env]().read(puzzle)
    task = make_task(env, puzzle)
    with pytest.raises(EnvError, match="task t: "):
        ENVS[env](task).reset(task)


def test_a_step_before_reset_is_an_error() -> None:
    env = ENVS["blocksworld"](make_task("blocksworld", BLOCKS))
    with pytest.raises(EnvError, match="before reset"):
        asyncio.run(env.step("1"))


def test_a_step_after_the_end_is_an_error() -> None:
    with pytest.raises(EnvError, match="after the end"):
        play("blocksworld", BLOCKS, BLOCKS_SOLUTION, BLOCKS_SOLUTION)


def test_a_picture_has_a_board_for_every_state() -> None:
    picture = draw_boards(make_task("plan_path", PATH), ["R D", "nonsense", "D R"])
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.count("<rect") == 4 * 9
    # four boards of three cells, which are 24 pixels wide, and gaps of 16 pixels
    assert 'width="368" height="104"' in picture
    assert picture.count(">S</text>") == 4
    assert picture.count(">G</text>") == 3  # on the last board S stands on the goal


def test_a_picture_of_blocks_shows_the_current_stacks_on_the_table() -> None:
    picture = draw_boards(make_task("blocksworld", BLOCKS), [])
    assert picture.count("<rect") == 6
