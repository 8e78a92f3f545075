"""Games with exact rewards: rules over immutable states, generators of puzzles, and zero-sum games."""

from typing import Any

from rollout.environments.games.blocksworld import Blocksworld, BlocksworldSource
from rollout.environments.games.game import Game, PuzzleSource
from rollout.environments.games.grids import PlanPath, PlanPathSource, Sokoban, SokobanSource
from rollout.environments.games.kuhn_poker import KuhnPoker
from rollout.environments.games.leduc_poker import LeducPoker
from rollout.environments.games.sudoku import Sudoku, SudokuSource
from rollout.environments.games.tic_tac_toe import TicTacToe
from rollout.environments.games.zero_sum import ZeroSumGame

# Rules of the puzzles by name; their keyword arguments are the option `rewards` of the environment.
GAMES: dict[str, type[Game[Any]]] = {
    "plan_path": PlanPath,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "blocksworld": Blocksworld,
}

# Generators of the puzzles by the name of their game; their keyword arguments are options of the tasks.
PUZZLES: dict[str, type[PuzzleSource]] = {
    source.game: source
    for source in (PlanPathSource, SokobanSource, SudokuSource, BlocksworldSource)
}

# Rules of the games of two players by name. A task is a deal.
ZERO_SUM_GAMES: dict[str, type[ZeroSumGame[Any]]] = {
    "kuhn_poker": KuhnPoker,
    "leduc_poker": LeducPoker,
    "tic_tac_toe": TicTacToe,
}
