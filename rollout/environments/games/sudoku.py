"""The game Sudoku, with 4x4 or 9x9 cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from math import isqrt
from random import Random
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationInfo

from rollout.environments.games import game as puzzles
from rollout.environments.games.game import Game, Owns, Played, PuzzleSource

Cells = tuple[int, ...]  # digits of size * size cells by rows; 0 if the cell is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class SudokuGrid:
    """A puzzle with the digits that the player has written.

    Attributes:
        given: digits of the puzzle.
        cells: digits of the puzzle and of the player.
        solution: digits of the solution; of the first one that was found if there are several.
        changes: number of times that the player has changed the digit of a cell.
    """

    size: int
    given: Cells
    cells: Cells
    solution: Cells
    changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sudoku(Game[SudokuGrid]):
    """Rules of Sudoku with the rewards of Stronger-MAS's released code.

    A list of actions writes the whole grid or single cells. Its reward is

    r = step · n + solved_reward + efficient · e                                if the grid is solved
    r = step · n + progress · Δfilled + constraint · Δsatisfied + broken · b    otherwise

    - n: number of single cells in the list; 1 for a whole grid.
    - e: 1 if the number of changed cells, counted over all lists so far, is at most the number of
      empty cells of the puzzle; else 0. A cell that is changed twice counts twice.
    - filled: share of cells with a digit.
    - satisfied: sum of (number of digits − 1) over the rows, columns and boxes that have digits and
      repeat none.
    - b: 1 if a row, column or box has a repeated digit; else 0.

    Δ is the change by the list. A list that contradicts given digits writes nothing and has the
    reward step · n + broken; each contradiction counts as an impossible action, in a whole grid too. A
    text that writes neither a grid nor cells has the reward malformed. If the game ends without a
    solution, fail is added.
    """

    step: float = -0.01
    solved_reward: float = 2.0
    efficient: float = 0.5
    progress: float = 0.5
    constraint: float = 0.02
    broken: float = -0.5
    fail: float = 0.0
    malformed: float = -1.0

    about = puzzles.RULES["sudoku"]

    def read(self, puzzle: str) -> SudokuGrid:
        rows = puzzles.parse_rows(puzzle, ".123456789")
        size = len(rows)
        given = tuple(0 if sign == "." else int(sign) for row in rows for sign in row)
        if size not in (4, 9) or len(rows[0]) != size or max(given) > size:
            raise puzzles.BadPuzzle(
                f"Sudoku: {size} rows of {len(rows[0])} cells with digits up to {max(given)}; "
                "expected 4 rows of 4 with digits up to 4, or 9 rows of 9"
            )
        solution = _solution(given)
        if solution is None:
            raise puzzles.BadPuzzle("Sudoku: the grid has no solution")
        return SudokuGrid(size=size, given=given, cells=given, solution=solution)

    def board(self, state: SudokuGrid) -> list[list[str]]:
        signs = [str(digit) if digit else "." for digit in state.cells]
        return [signs[i : i + state.size] for i in range(0, len(signs), state.size)]

    def play(self, state: SudokuGrid, actions: str) -> Played[SudokuGrid] | None:
        parsed = _parse_writes(puzzles.parse_actions(actions), state.size)
        if parsed is None:
            return None
        n, writes = parsed
        contradictions = sum(state.given[index] not in (0, digit) for index, digit in writes)
        if contradictions:
            reward = self.step * n + self.broken
            return Played(state=state, reward=reward, impossible_actions=contradictions)
        after = _write(state, writes)
        return Played(state=after, reward=self._reward(n, state, after))

    def _reward(self, n: int, before: SudokuGrid, after: SudokuGrid) -> float:
        """Return the reward r of a list that contradicts no given digit (see the class)."""
        reward = self.step * n
        if self.solved(after):
            reward += self.solved_reward
            if after.changes <= after.given.count(0):
                reward += self.efficient
            return reward

        reward += self.progress * (_filled(after.cells) - _filled(before.cells))
        reward += self.constraint * (_satisfied(after.cells) - _satisfied(before.cells))
        if _repeats(after.cells):
            reward += self.broken
        return reward

    def solved(self, state: SudokuGrid) -> bool:
        """Return True if the grid is full and no digit repeats."""
        return 0 not in state.cells and not _repeats(state.cells)

    def measure(self, state: SudokuGrid) -> Mapping[str, float]:
        """Return `progress`: share of the cells without a given digit that hold the digit of `solution`.

        It is 1 for every solved grid, also if the puzzle has several solutions.
        """
        if self.solved(state):
            return {"progress": 1.0}
        # A puzzle without empty cells is solved from the start, so the list is not empty.
        not_given = [index for index, digit in enumerate(state.given) if not digit]
        correct = sum(state.cells[index] == state.solution[index] for index in not_given)
        return {"progress": correct / len(not_given)}

    def solve(self, state: SudokuGrid) -> str | None:
        return ", ".join("".join(row) for row in self.board(replace(state, cells=state.solution)))


def solutions(given: Cells, random: Random | None = None) -> Iterator[Cells]:
    """Yield every solution of a grid; none if two given digits contradict each other.

    Args:
        given: digits of the cells by rows; 0 if the cell is empty.
        random: source of a random order of the solutions; None: a fixed order.
    """
    size = isqrt(len(given))
    units = _units(size)  # for each cell, the indices of its row, column and box in `used`
    used = [0] * (3 * size)  # bit mask of the digits in each row, column and box
    cells = list(given)
    for index, digit in enumerate(cells):
        if digit:
            if any(used[unit] >> digit & 1 for unit in units[index]):
                return  # the grid repeats a digit
            for unit in units[index]:
                used[unit] |= 1 << digit
    digits = range(1, size + 1)

    def tightest_cell() -> tuple[int, int] | None:
        """Return (index, excluded digits) of the empty cell with the fewest possible digits.

        The excluded digits are those of its row, column and box, as a bit mask. Return None if the
        grid is full.
        """
        tightest = None
        most_excluded = -1
        for index, digit in enumerate(cells):
            if digit:
                continue
            row, column, box = units[index]
            excluded = used[row] | used[column] | used[box]
            if excluded.bit_count() > most_excluded:
                most_excluded = excluded.bit_count()
                tightest = (index, excluded)
        return tightest

    def search() -> Iterator[Cells]:
        """Yield the solutions of `cells`: try every possible digit of the tightest cell."""
        tightest = tightest_cell()
        if tightest is None:
            yield tuple(cells)
            return
        index, excluded = tightest
        digits_in_order = random.sample(digits, size) if random else digits
        for digit in digits_in_order:
            if excluded >> digit & 1:
                continue
            cells[index] = digit
            for unit in units[index]:
                used[unit] |= 1 << digit
            yield from search()
            cells[index] = 0
            for unit in units[index]:
                used[unit] &= ~(1 << digit)

    yield from search()


@lru_cache(maxsize=4096)
def _solution(given: Cells) -> Cells | None:
    """Return the first solution of a grid that is found, or None."""
    return next(solutions(given), None)


@lru_cache
def _units(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return the row, column and box of each cell.

    Rows are numbered from 0, columns from size and boxes from 2 * size, so all numbers differ.
    """
    side = isqrt(size)
    units = []
    for row in range(size):
        for column in range(size):
            box = row // side * side + column // side
            units.append((row, size + column, 2 * size + box))
    return tuple(units)


def _by_unit(cells: Cells) -> list[list[int]]:
    """Return the digits in each row, column and box."""
    size = isqrt(len(cells))
    digits: list[list[int]] = [[] for _ in range(3 * size)]
    for units, digit in zip(_units(size), cells, strict=True):
        if digit:
            for unit in units:
                digits[unit].append(digit)
    return digits


def _repeats(cells: Cells) -> bool:
    """Return True if a row, column or box has a repeated digit."""
    return any(len(set(unit)) < len(unit) for unit in _by_unit(cells))


def _satisfied(cells: Cells) -> int:
    """Return `satisfied` of the reward (see `Sudoku`)."""
    return sum(max(len(unit) - 1, 0) for unit in _by_unit(cells) if len(set(unit)) == len(unit))


def _filled(cells: Cells) -> float:
    """Return the share of cells with a digit."""
    return 1 - cells.count(0) / len(cells)


def _parse_writes(actions: Sequence[str], size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Parse a whole grid or single cells.

    Returns:
        n of the reward (see `Sudoku`), and (cell index, digit) of each write; None if the actions
        are neither a grid nor cells.
    """
    rows = [action.replace(" ", "") for action in actions]
    legal = {str(digit) for digit in range(1, size + 1)}
    if len(rows) == size and all(len(row) == size and set(row) <= legal for row in rows):
        return 1, list(enumerate(map(int, "".join(rows))))
    cells = [action.split() for action in actions]
    if not cells or any(len(cell) != 3 or not set(cell) <= legal for cell in cells):
        return None
    writes = []
    for row, column, digit in cells:
        index = (int(row) - 1) * size + int(column) - 1
        writes.append((index, int(digit)))
    return len(cells), writes


def _write(state: SudokuGrid, writes: Sequence[tuple[int, int]]) -> SudokuGrid:
    """Return the state after writes, each a (cell index, digit)."""
    cells = list(state.cells)
    changes = state.changes
    for index, digit in writes:
        if cells[index] != digit:
            changes += 1
        cells[index] = digit
    return replace(state, cells=tuple(cells), changes=changes)


_DEFAULT_GIVENS = {4: 8, 9: 36}
# No puzzle with fewer givens has a unique solution (McGuire et al. 2012 for size 9).
_MIN_GIVENS = {4: 4, 9: 17}


def _check_givens(givens: int | None, info: ValidationInfo) -> int | None:
    size = info.data.get("size")
    if givens is not None and size is not None and not _MIN_GIVENS[size] <= givens < size**2:
        raise ValueError(
            f"expected an integer from {_MIN_GIVENS[size]} to {size**2 - 1} for size {size}, "
            "or null"
        )
    return givens


@dataclass(frozen=True, slots=True, kw_only=True)
class SudokuSource(PuzzleSource):
    """Generator of puzzles of one size.

    Puzzles that differ only in the names of the digits have the same key. For 9 by 9 the key is the
    solution, so no two splits share a solution. 4 by 4 has only 12 solutions up to the names
    of the digits, so there the puzzle is the key.

    Args:
        size: cells of a side.
        givens: number of given digits; null: 8 of 16, or 36 of 81.
    """

    size: Literal[4, 9] = 4
    givens: Annotated[int | None, AfterValidator(_check_givens)] = None

    game = "sudoku"
    name_format = "sudoku_{0.size}x{0.size}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Draw a full grid, and remove digits until `givens` are left."""
        solution = next(solutions((0,) * self.size**2, random))
        key_is_solution = self.size == 9
        if key_is_solution and not owns(_canonical(solution)):
            return None
        puzzle = self._remove_digits(solution, random)
        if puzzle is None:
            return None
        if not key_is_solution and not owns(_canonical(puzzle)):
            return None
        grid = SudokuGrid(size=self.size, given=puzzle, cells=puzzle, solution=solution)
        return Sudoku().show(grid)

    def _remove_digits(self, solution: Cells, random: Random) -> Cells | None:
        """Remove digits in random order until `givens` are left; return None if more have to stay.

        A digit has to stay if the grid would have several solutions without it.
        """
        cells = list(solution)
        digits_left = len(cells)
        for index in random.sample(range(len(cells)), len(cells)):
            if digits_left == self._givens:
                break
            cells[index] = 0
            first_solutions = list(islice(solutions(tuple(cells)), 2))
            if len(first_solutions) == 1:
                digits_left -= 1
            else:
                cells[index] = solution[index]
        return tuple(cells) if digits_left == self._givens else None

    def slip(self, random: Random, actions: str) -> str:
        return puzzles.replace_one(
            random, actions, r"\d", [str(digit) for digit in range(1, self.size + 1)]
        )

    @property
    def _givens(self) -> int:
        """Number of given digits: `givens`, or the default for the size if it is null."""
        return _DEFAULT_GIVENS[self.size] if self.givens is None else self.givens


def _canonical(cells: Cells) -> str:
    """Return the cells as a text, their digits renamed 1, 2, ... in the order of first appearance."""
    renamed: dict[int, int] = {0: 0}  # an empty cell stays 0
    return "".join(str(renamed.setdefault(digit, len(renamed))) for digit in cells)
