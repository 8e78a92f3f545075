"""Demonstrations of puzzles: valid replies, training puzzles, prompts, and slips."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rollout.environments.games import PUZZLES
from rollout.orchestras.acting import game_team
from rollout.records.trajectory import Demonstration
from rollout.tasks.generators import GENERATORS
from rollout.tasks.puzzles import puzzle_demonstrations
from rollout.tasks.splits import split_of
from tests.support.puzzle_team import PATH_TASK, play_puzzle, puzzle_roles

TEAM = ("tool", "planner")
PUZZLE_OPTIONS: dict[str, dict[str, int]] = {"plan_path": {"size": 5}, "sudoku": {}, "sokoban": {}}


def demonstrations(
    game: str, agents: tuple[str, ...], seed: int, n: int, **options: Any
) -> list[Demonstration]:
    return list(
        puzzle_demonstrations(PUZZLES[game], seed, n, roles=puzzle_roles(agents), **options)
    )


@pytest.mark.parametrize("game", PUZZLE_OPTIONS)
@pytest.mark.parametrize("agents", [TEAM, ("player",)])
def test_demonstrations_are_valid_replies_of_the_agents(game: str, agents: tuple[str, ...]) -> None:
    options = PUZZLE_OPTIONS[game]
    roles = puzzle_roles(agents)
    shown = demonstrations(game, agents, 1, 60, **options)
    assert len(shown) == 60
    assert {demonstration.agent for demonstration in shown} == set(agents)
    for demonstration in shown:
        reply = demonstration.messages[-1].content
        assert roles[demonstration.agent].parse(reply) is not None
    assert list(GENERATORS[game].demonstrations(1, 60, roles=roles, **options)) == shown


@pytest.mark.parametrize("agents", [TEAM, ("player",)])
def test_demonstrations_are_on_training_puzzles(agents: tuple[str, ...]) -> None:
    for demonstration in demonstrations("plan_path", agents, 1, 60, size=5):
        prompt = demonstration.messages[0].content
        puzzle = prompt.split("|")[0].split("\nImpossible")[0]
        rows = puzzle.splitlines()[1:]  # the first line has the coordinates of start and goal
        cells = [row.replace("S", ".").replace("G", ".").split() for row in rows]
        free_cells: list[tuple[int, int]] = []
        for y, row in enumerate(cells):
            free_cells += [(y, x) for x, sign in enumerate(row) if sign == "."]
        assert split_of(f"plan_path5{free_cells}") == "train"


def test_demonstrations_have_the_prompts_of_the_orchestra() -> None:
    tool, planner = demonstrations("plan_path", TEAM, 2, 2, slips={}, size=4)
    tool_prompt, tool_reply = [message.content for message in tool.messages]
    planner_prompt, planner_reply = [message.content for message in planner.messages]
    puzzle = tool_prompt.removeprefix("propose ").removesuffix("|")
    actions = tool_reply.removeprefix("**Actions List**: ")
    assert planner_prompt == f"decide {puzzle}||{actions}"
    assert planner_reply == f"#### {actions}"

    task = replace(PATH_TASK, prompt=puzzle)
    trajectory, prompts = play_puzzle(
        game_team, puzzle_roles(TEAM), tool_reply, planner_reply, task=task
    )
    assert prompts == [tool_prompt, planner_prompt]
    assert trajectory.success == 1.0


def planner_choices(**slips: float) -> Counter[str]:
    """Count the first turns in which the planner takes the proposal over, and changes it."""
    shown = demonstrations("plan_path", TEAM, 3, 400, slips=slips, max_turns=1, size=4)
    choices: Counter[str] = Counter()
    for tool, planner in zip(shown[::2], shown[1::2], strict=True):
        proposal = tool.messages[-1].content.removeprefix("**Actions List**: ")
        actions = planner.messages[-1].content.removeprefix("#### ")
        choices["taken over" if proposal == actions else "changed"] += 1
    return choices


@pytest.mark.parametrize(
    ("slips", "choices"),
    [
        ({}, {"taken over": 200}),
        ({"tool": 1.0}, {"changed": 200}),
        ({"tool": 1.0, "planner": 1.0}, {"taken over": 200}),
    ],
)
def test_only_the_named_agents_slip(slips: dict[str, float], choices: dict[str, int]) -> None:
    assert planner_choices(**slips) == choices


def test_agents_slip_as_often_as_configured() -> None:
    assert planner_choices(tool=0.5)["taken over"] == pytest.approx(100, abs=25)
