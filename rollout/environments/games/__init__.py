"""Puzzles with exact rewards: rules as pure functions of immutable states, played by one environment.

game         what a game's rules promise, and `GameEnv`, which plays any of them
actions      how a reply writes down a list of actions
plan_path    a way through a grid with obstacles
sokoban      boxes to push onto goals
sudoku       a 4x4 or 9x9 grid with one solution
queens       queens that may not attack each other, some of them placed
blocksworld  stacks to rebuild
picture      a trajectory as an SVG image
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.environments.games.blocksworld import Blocksworld, BlocksworldSource
from rollout.environments.games.game import Game
from rollout.environments.games.generator import Source
from rollout.environments.games.plan_path import PlanPath, PlanPathSource
from rollout.environments.games.queens import Queens, QueensSource
from rollout.environments.games.sokoban import Sokoban, SokobanSource
from rollout.environments.games.sudoku import Sudoku, SudokuSource

GAMES: dict[str, Callable[..., Game[Any]]] = {  # keyword arguments are the rewards
    "plan_path": PlanPath,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "queens": Queens,
    "blocksworld": Blocksworld,
}

SOURCES: dict[str, type[Source]] = {  # by game; keyword arguments are a generator's options
    "plan_path": PlanPathSource,
    "sokoban": SokobanSource,
    "sudoku": SudokuSource,
    "queens": QueensSource,
    "blocksworld": BlocksworldSource,
}
