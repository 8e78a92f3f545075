"""N queens: place a queen in every row so that none attacks another; some stand already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from random import Random

from rollout.environments.games.game import BadPuzzle, Played, items, parse_rows
from rollout.environments.games.generator import Owns, replace_one

Columns = tuple[int, ...]  # [N] column of the queen in each row, from 1; 0 in a row without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The queens that were there, and all queens."""

    given: Columns
    queens: Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Queens:
    """1 for a solution and 0 for anything else, as in Stronger-MAS's released code."""

    solved_reward: float = 1.0
    fail: float = 0.0
    malformed: float = -1.0

    @property
    def about(self) -> str:
        """The rules and the form of an action list."""
        return (
            "Place one queen (Q) in every row so that no two share a column or a diagonal. Queens that stand already "
            "stay.\nActions: the column of the queen in each row from the top, columns counted from 1, for example "
            "2, 4, 1, 3 on a board of 4 rows"
        )

    def read(self, puzzle: str) -> Board:
        """The first state.

        Raises:
            BadPuzzle: the text is no square board with a solution.
        """
        rows = parse_rows(puzzle, ".Q")
        if len(rows) != len(rows[0]) or any(row.count("Q") > 1 for row in rows):
            raise BadPuzzle("Queens: expected a square board with at most one queen a row")
        given = tuple(row.index("Q") + 1 if "Q" in row else 0 for row in rows)
        if next(placements(given), None) is None:
            raise BadPuzzle("Queens: the queens that stand there leave no solution")
        return Board(given=given, queens=given)

    def show(self, state: Board) -> str:
        """The board, a sign a square."""
        return "\n".join(" ".join(row) for row in self.board(state))

    def board(self, state: Board) -> list[list[str]]:
        """The board, a sign a square."""
        size = len(state.queens)
        return [["Q" if column == queen else "." for column in range(1, size + 1)] for queen in state.queens]

    def play(self, state: Board, actions: str) -> Played[Board] | None:
        """Place all queens; a list that moves a given queen is impossible and places none."""
        found, size = items(actions), len(state.given)
        if len(found) != size or any(not column.isascii() or not column.isdigit() for column in found):
            return None
        queens = tuple(int(column) for column in found)
        if not all(1 <= column <= size for column in queens):
            return None
        if any(given and given != queen for given, queen in zip(state.given, queens, strict=True)):
            return Played(state=state, reward=0.0, impossible=1)
        after = replace(state, queens=queens)
        return Played(state=after, reward=self.solved_reward if self.solved(after) else 0.0)

    def solved(self, state: Board) -> bool:
        """Whether every row has a queen and none is attacked."""
        return 0 not in state.queens and not _attacked(state.queens)

    def spent(self, state: Board) -> bool:
        """Never: queens can be placed anew."""
        return False

    def measure(self, state: Board) -> Mapping[str, float]:
        """`progress`: queens that nobody attacks, as a share of the rows."""
        placed = len(state.queens) - state.queens.count(0)
        return {"progress": (placed - len(_attacked(state.queens))) / len(state.queens)}

    def solve(self, state: Board) -> str | None:
        """The first solution in the order of columns."""
        queens = next(placements(state.given), None)
        return None if queens is None else ", ".join(map(str, queens))


def placements(given: Columns) -> Iterator[Columns]:
    """Every solution that keeps the `given` queens, in the order of columns."""

    def extend(queens: Columns) -> Iterator[Columns]:
        row = len(queens)
        if row == len(given):
            yield queens
            return
        for column in (given[row],) if given[row] else range(1, len(given) + 1):
            if all(column != other and abs(column - other) != row - up for up, other in enumerate(queens)):
                yield from extend((*queens, column))

    yield from extend(())


def _attacked(queens: Columns) -> set[int]:
    """Rows whose queen another queen attacks."""
    placed = [(row, column) for row, column in enumerate(queens) if column]
    pairs = ((a, b) for a, b in combinations(placed, 2) if a[1] == b[1] or abs(a[1] - b[1]) == b[0] - a[0])
    return {row for pair in pairs for row, _ in pair}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueensSource:
    """Every way to give `given` queens of a solution; the board is the key."""

    size: int = 8
    given: int = 3

    def __post_init__(self) -> None:
        if not 4 <= self.size <= 10 or not 0 <= self.given < self.size:
            raise ValueError(
                f"queens: size {self.size}, given {self.given}; expected 4 <= size <= 10 and 0 <= given < size"
            )

    @property
    def game(self) -> str:
        """Name in GAMES."""
        return "queens"

    @property
    def name(self) -> str:
        """The data source."""
        return f"queens_{self.size}_{self.given}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """One of all boards."""
        key, board = random.choice(self.everything())
        return board if owns(key) else None

    def everything(self) -> tuple[tuple[str, str], ...]:
        """Every board."""
        return _boards(self.size, self.given)

    def slip(self, random: Random, actions: str) -> str:
        """One queen in another column."""
        return replace_one(random, actions, r"\d+", [str(column) for column in range(1, self.size + 1)])


@lru_cache(maxsize=4)
def _boards(size: int, given: int) -> tuple[tuple[str, str], ...]:
    boards = {
        tuple(column if row in kept else 0 for row, column in enumerate(solution))
        for solution in placements((0,) * size)
        for kept in combinations(range(size), given)
    }
    shown = (Queens().show(Board(given=board, queens=board)) for board in sorted(boards))
    return tuple((text, text) for text in shown)
