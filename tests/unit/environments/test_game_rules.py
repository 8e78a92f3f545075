"""Rewards of the games, computed by hand, and their grammars."""

from __future__ import annotations

import asyncio
from itertools import product
from xml.etree import ElementTree

import pytest

from mcore_mas.reports.game_pictures import draw_boards
from rollout.base.errors import EnvError
from rollout.environments import ENVS
from rollout.environments.games import GAMES
from rollout.environments.games.game import BadPuzzle, items, letters
from rollout.environments.games.sudoku import solutions
from rollout.environments.protocol import Step
from rollout.records.trajectory import Task

PATH = "S 1 1 G 3 3\nS . .\n# . #\n. . G"
ROOM = "# # # # # #\n# @ _ $ . #\n# # # # # #"
TWO_BOXES = "# # # # # # #\n# @ * _ $ . #\n# # # # # # #"
SHEET = "1 . 3 4\n3 4 1 .\n. 1 4 3\n4 3 . 1"
TABLE = "now: A B | C\ngoal: C B A"


def task(env: str, puzzle: str) -> Task:
    return Task(id="t", prompt=puzzle, answers=(), env=env, source=env, split="train")


def play(env: str, puzzle: str, *actions: str, max_turns: int = 9, **rewards: float) -> list[Step]:
    world = ENVS[env](task(env, puzzle), max_turns=max_turns, rewards=GAMES[env](**rewards))
    world.reset(task(env, puzzle))

    async def steps() -> list[Step]:
        return [await world.step(text) for text in actions]

    return asyncio.run(steps())


def reward(env: str, puzzle: str, *actions: str, **options: float) -> float:
    """Of the last of the lists of actions."""
    return play(env, puzzle, *actions, **options)[-1].reward  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found"),
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
def test_an_action_list_is_read_in_every_spelling_and_no_other(text: str, found: list[str]) -> None:
    assert items(text) == found


def test_letters_need_no_commas() -> None:
    assert letters("R R, D", "UDLR") == ["R", "R", "D"]
    assert letters("RRD", "UDLR") == []
    assert letters("R, X", "UDLR") == []
    assert letters("r", "UDLR") == []


def test_plan_path_shortest_way() -> None:
    [step] = play("plan_path", PATH, "R D D R")
    # distances 4 3 2 1 0: shaping 1.03 + 1.02 + 1.01 + 1, four steps of -0.01, goal 1, shortest 0.5
    assert step.reward == pytest.approx(4.06 - 0.04 + 1.5)
    assert step.done
    assert step.metrics == {
        "solved": 1.0, "progress": 1.0, "optimal": 1.0, "impossible_actions": 0.0, "malformed_actions": 0.0,
    }  # fmt: skip


def test_plan_path_detour_and_walls() -> None:
    # distances 4 3 2 3 2 1 0: shaping 1.03 + 1.02 - 0.97 + 1.02 + 1.01 + 1; six steps; no bonus
    assert reward("plan_path", PATH, "R R L D D R") == pytest.approx(4.11 - 0.06 + 1)
    [lost] = play("plan_path", PATH, "L, D")
    assert lost.reward == pytest.approx(2 * (-0.1 + 4 - 0.99 * 4))
    assert lost.observation == PATH + "\nImpossible actions: 2."
    assert lost.metrics["impossible_actions"] == 2
    assert not lost.done


def test_plan_path_goes_on_where_it_stood_and_stops_at_the_goal() -> None:
    first, second = play("plan_path", PATH, "R D", "D R U U U")
    assert first.observation == "S 2 2 G 3 3\n. . .\n# S #\n. . G"
    assert first.metrics["progress"] == 0.5
    assert second.reward == pytest.approx(1.01 + 1 - 0.02 + 1.5)
    assert second.metrics["optimal"] == 1.0


def test_plan_path_failures() -> None:
    [spent] = play("plan_path", PATH, "R", max_turns=1)
    assert (spent.reward, spent.done, spent.metrics["solved"]) == (
        pytest.approx(-0.01 + 1.03 - 1),
        True,
        0.0,
    )
    assert spent.metrics["progress"] == 0.25
    [malformed, then] = play("plan_path", PATH, "go right", "", max_turns=2)
    assert (malformed.reward, malformed.done) == (-1.0, False)
    assert malformed.observation == PATH + "\nNo list of actions was given."
    assert (then.reward, then.done, then.metrics["malformed_actions"]) == (-2.0, True, 2.0)
    [moves] = play("plan_path", PATH, "R R L D", max_moves=2)
    assert (moves.reward, moves.done) == (pytest.approx(1.03 + 1.02 - 0.02 - 1), True)


def test_sokoban() -> None:
    # a step without a push: -0.01 + 0.1 (1 - 0.99); the push: -0.01 + 1 + 0.1 (1 - 0) + 10
    assert reward("sokoban", ROOM, "R R") == pytest.approx(-0.009 + 11.09)
    assert reward("sokoban", ROOM, "L") == pytest.approx(-0.05 + 0.1 * 0.01)
    # off the goal: -0.01 - 0.5 + 0.1 (1 - 0.99 * 2)
    [off] = play("sokoban", TWO_BOXES, "R")
    assert off.reward == pytest.approx(-0.51 - 0.098)
    assert off.observation == "# # # # # # #\n# _ + $ $ . #\n# # # # # # #"
    assert off.metrics["progress"] == 0.0
    # two boxes in a row do not move
    assert play("sokoban", TWO_BOXES, "R", "R")[1].metrics["impossible_actions"] == 1
    assert reward("sokoban", ROOM, "L", max_turns=1) == pytest.approx(-0.049 - 5)
    assert GAMES["sokoban"]().solve(GAMES["sokoban"]().read(ROOM)) == "R R"


def test_sudoku() -> None:
    grid = "1234, 3412, 2143, 4321"
    [step] = play("sudoku", SHEET, grid)
    assert (step.reward, step.done, step.metrics["solved"]) == (
        pytest.approx(-0.01 + 2 + 0.5),
        True,
        1.0,
    )
    assert reward("sudoku", SHEET, "[[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]") == pytest.approx(
        2.49
    )
    assert reward("sudoku", SHEET, "1 2 2, 2 4 2, 3 1 2, 4 3 2") == pytest.approx(4 * -0.01 + 2.5)
    # one of 16 cells; a row, a column and a box have one digit more
    [one] = play("sudoku", SHEET, "1 2 2")
    assert one.reward == pytest.approx(-0.01 + 0.5 / 16 + 0.02 * 3)
    assert one.metrics["progress"] == 0.25
    # 3 repeats in the row, the column and the box, which held two digits more than one each
    [broken, solved] = play("sudoku", SHEET, "1 2 3", grid)
    assert broken.reward == pytest.approx(-0.01 + 0.5 / 16 - 0.02 * 6 - 0.5)
    assert solved.reward == pytest.approx(
        -0.01 + 2
    )  # a cell was written twice: 5 writes for 4 empty cells
    [given] = play("sudoku", SHEET, "1 1 2, 1 2 2")
    assert given.reward == pytest.approx(-0.02 - 0.5)
    assert given.observation == SHEET + "\nImpossible actions: 1."
    for malformed in ("1234", "1 2 5", "1 0 2", "1 2", "1235, 3412, 2143, 4321"):
        assert reward("sudoku", SHEET, malformed) == -1.0


def test_blocksworld() -> None:
    [step] = play("blocksworld", TABLE, "B C, A B")
    assert (step.reward, step.done, step.metrics["solved"], step.metrics["optimal"]) == (
        1.0,
        True,
        1.0,
        1.0,
    )
    [longer] = play("blocksworld", TABLE, "B table, B C, A B")
    assert (longer.reward, longer.metrics["optimal"]) == (1.0, 0.0)
    [half] = play("blocksworld", TABLE, "A C, B C")  # A is under B
    assert half.observation == "now: A | C B\ngoal: C B A\nImpossible actions: 1."
    assert half.metrics["progress"] == pytest.approx(2 / 3)
    assert (half.reward, reward("blocksworld", TABLE, "B")) == (0.0, -1.0)


def test_known_numbers_of_solutions() -> None:
    assert sum(1 for _ in solutions((0,) * 16)) == 288


def test_no_way_is_shorter_than_the_one_found() -> None:
    game = GAMES["plan_path"]()
    state = game.read("S 1 1 G 1 3\nS # G\n. # .\n. . .")
    assert game.solve(state) == "D D R R U U"
    shorter = (" ".join(moves) for n in range(1, 6) for moves in product("UDLR", repeat=n))
    assert not any(game.solved(game.play(state, moves).state) for moves in shorter)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("env", "puzzle", "message"),
    [
        ("plan_path", "S 1 1 G 1 2\nS .", "one S and one G"),
        ("plan_path", "S 1 1 G 1 3\nS # G", "no way"),
        ("plan_path", "x\nS G\n.", "all of one length"),
        ("plan_path", "x\nS G ?", r"unknown sign '\?'"),
        ("sokoban", "# # #\n# @ #\n# # #", "1 players, 0 boxes, 0 goals"),
        ("sokoban", "@ $ .", "walls all around"),
        ("sudoku", "1 . 3\n. . .\n. . .", "3 rows of 3; expected 4 of 4"),
        ("sudoku", "1 1 . .\n. . . .\n. . . .\n. . . .", "no solution"),
        ("blocksworld", "now: A B\ngoal: A", "with the same blocks"),
        ("blocksworld", "A on B", "with the same blocks"),
    ],
)
def test_a_bad_puzzle_is_named(env: str, puzzle: str, message: str) -> None:
    with pytest.raises(BadPuzzle, match=message):
        GAMES[env]().read(puzzle)
    with pytest.raises(EnvError, match="task t: "):
        ENVS[env](task(env, puzzle)).reset(task(env, puzzle))


def test_a_game_is_played_between_reset_and_its_end() -> None:
    with pytest.raises(EnvError, match="before reset"):
        asyncio.run(ENVS["blocksworld"](task("blocksworld", TABLE)).step("1"))
    with pytest.raises(EnvError, match="after the end"):
        play("blocksworld", TABLE, "B C, A B", "B C, A B")


def test_rewards_are_options() -> None:
    assert reward("blocksworld", TABLE, "B C, A B", solved_reward=3.0) == 3.0


def test_a_picture_has_a_board_for_every_state() -> None:
    drawn = draw_boards(task("plan_path", PATH), ["R D", "nonsense", "D R"])
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert drawn.count("<rect") == 4 * 9
    assert (
        'width="368" height="104"' in drawn
    )  # four boards of three cells of 24 pixels, gaps of 16
    assert drawn.count(">S</text>") == 4
    assert drawn.count(">G</text>") == 3  # the last S stands on it
    assert draw_boards(task("blocksworld", TABLE), []).count("<rect") == 6
