"""Plan-Path (game): find a way from S to G through a grid with obstacles (Stronger-MAS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated

from pydantic import Field, PositiveInt

from rollout.base.options import Share
from rollout.environments.games.game import (
    MOVES,
    BadPuzzle,
    Cell,
    Game,
    Owns,
    Played,
    PuzzleSource,
    breadth_first,
    distance,
    letters,
    neighbour,
    one_by_one,
    parse_rows,
    replace_one,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Where the walker is."""

    free: frozenset[Cell]
    rows: int
    columns: int
    at: Cell
    goal: Cell
    shortest: int  # moves from the first position to the goal
    moves: int = 0  # made so far, impossible ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPath(Game[Walk]):
    """Rewards as in Stronger-MAS's released code; there `fail` comes after `max_moves` only."""

    step: float = -0.01
    impossible: float = -0.1  # in place of `step`
    goal: float = 1.0
    shortest: float = 0.5  # added at the goal when no way, counted in moves, is shorter
    fail: float = -1.0
    malformed: float = -1.0
    shaping: float = 1.0
    gamma: Share = 0.99
    max_moves: PositiveInt = 10_000

    about = (
        "Walk from S to G through a grid: . is free, # is an obstacle. A move goes one cell up (U), down (D), left "
        "(L) or right (R); a move into an obstacle or out of the grid is lost. Take the shortest way. Positions "
        "are row and column, counted from 1 at the top left.\nActions: moves, for example R R D"
    )

    def read(self, puzzle: str) -> Walk:
        """The first state.

        Raises:
            BadPuzzle: the text is no grid with one S and one G and a way between them.
        """
        rows = parse_rows(puzzle.partition("\n")[2], ".#SG")
        cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
        ends = [[cell for cell, sign in cells.items() if sign == end] for end in "SG"]
        if [len(found) for found in ends] != [1, 1]:
            raise BadPuzzle("Plan-Path: expected a grid with one S and one G below its first line")
        free = frozenset(cell for cell, sign in cells.items() if sign != "#")
        start, goal = ends[0][0], ends[1][0]
        way = shortest_way(free, start, goal)
        if way is None:
            raise BadPuzzle("Plan-Path: there is no way from S to G")
        return Walk(free=free, rows=len(rows), columns=len(rows[0]), at=start, goal=goal, shortest=len(way))

    def show(self, state: Walk) -> str:
        """Both positions, and the grid."""
        (row, column), (goal_row, goal_column) = state.at, state.goal
        places = f"S {row + 1} {column + 1} G {goal_row + 1} {goal_column + 1}"
        return "\n".join([places, *(" ".join(row) for row in self.board(state))])

    def board(self, state: Walk) -> list[list[str]]:
        """The grid: S is where the walker is."""
        signs = {state.goal: "G", state.at: "S"}
        return [
            [signs.get((r, c), "." if (r, c) in state.free else "#") for c in range(state.columns)]
            for r in range(state.rows)
        ]

    def play(self, state: Walk, actions: str) -> Played[Walk] | None:
        """Walk; moves after the goal is reached are not made."""
        moves = letters(actions, "UDLR")
        return one_by_one(self, state, moves, self._move) if moves else None

    def _move(self, state: Walk, move: str) -> Played[Walk]:
        to = neighbour(state.at, move)
        possible = to in state.free
        after = replace(state, at=to if possible else state.at, moves=state.moves + 1)
        reward = self.step if possible else self.impossible
        # F = λ (γ Φ(s') − Φ(s)), Φ = −distance to the goal   potential-based shaping, Ng et al. 1999
        reward += self.shaping * (distance(state.at, state.goal) - self.gamma * distance(after.at, state.goal))
        if self.solved(after):
            reward += self.goal + (self.shortest if after.moves == after.shortest else 0.0)
        return Played(state=after, reward=reward, impossible=not possible)

    def solved(self, state: Walk) -> bool:
        """Whether the goal is reached."""
        return state.at == state.goal

    def spent(self, state: Walk) -> bool:
        """Whether `max_moves` are made."""
        return state.moves >= self.max_moves

    def measure(self, state: Walk) -> Mapping[str, float]:
        """`progress`: share of the shortest way that is behind the walker; `optimal`: solved without a detour."""
        left = len(shortest_way(state.free, state.at, state.goal) or ())
        optimal = self.solved(state) and state.moves == state.shortest
        return {"progress": max(0.0, 1 - left / state.shortest), "optimal": float(optimal)}

    def solve(self, state: Walk) -> str | None:
        """A shortest way."""
        way = shortest_way(state.free, state.at, state.goal)
        return None if way is None else " ".join(way)


def shortest_way(free: frozenset[Cell], start: Cell, goal: Cell) -> list[str] | None:
    """The fewest moves through `free` cells from `start` to `goal`, None when there is no way."""

    def after(cell: Cell) -> list[tuple[str, Cell]]:
        return [(move, to) for move in MOVES if (to := neighbour(cell, move)) in free]

    return breadth_first(start, after, lambda cell: cell == goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPathSource(PuzzleSource):
    """Square grids; the obstacles are the key, so no split has seen another's map."""

    size: Annotated[int, Field(ge=2)] = 10
    obstacles: Annotated[float, Field(ge=0, lt=1)] = 0.22  # probability of each cell

    game = "plan_path"

    @property
    def name(self) -> str:
        return f"plan_path_{self.size}x{self.size}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Random obstacles, then two random free cells; none when there is no way between them."""
        cells: list[Cell] = [(r, c) for r in range(self.size) for c in range(self.size)]
        free = [cell for cell in cells if random.random() >= self.obstacles]
        if len(free) < 2 or not owns(f"plan_path{self.size}{free}"):
            return None
        start, goal = random.sample(free, 2)
        way = shortest_way(frozenset(free), start, goal)
        if way is None:
            return None
        return PlanPath().show(
            Walk(
                free=frozenset(free),
                rows=self.size,
                columns=self.size,
                at=start,
                goal=goal,
                shortest=len(way),
            )
        )

    def slip(self, random: Random, actions: str) -> str:
        """One move in another direction."""
        return replace_one(random, actions, r"\w", "UDLR")
