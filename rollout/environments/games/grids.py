"""Grid games: Plan-Path, a way from S to G through obstacles, and Sokoban, boxes to push onto goals (Stronger-MAS)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Annotated, TypeVar

from pydantic import Field, PositiveInt

from rollout.base.section import Share
from rollout.environments.games import game as puzzles
from rollout.environments.games.game import Game, Owns, Played, PuzzleSource

Cell = tuple[int, int]  # row, column, from 0 at the top left

MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def neighbour(cell: Cell, move: str) -> Cell:
    """The cell one `move` away."""
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def distance(one: Cell, other: Cell) -> int:
    """Manhattan distance in cells."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How large the grid is, and how often the player has moved."""

    rows: int
    columns: int
    moves: int = 0  # made so far, impossible ones included


_Grid = TypeVar("_Grid", bound=Grid)


class _GridGame(Game[_Grid]):
    """Actions are moves, of which there are at most `max_moves`."""

    max_moves: int

    def play(self, state: _Grid, actions: str) -> Played[_Grid] | None:
        moves = puzzles.letters(actions, "UDLR")
        return puzzles.one_by_one(self, state, moves, self._move) if moves else None

    def _move(self, state: _Grid, move: str) -> Played[_Grid]:
        raise NotImplementedError

    def board(self, state: _Grid) -> list[list[str]]:
        return [
            [self._sign(state, (r, c)) for c in range(state.columns)] for r in range(state.rows)
        ]

    def _sign(self, state: _Grid, cell: Cell) -> str:
        raise NotImplementedError

    def spent(self, state: _Grid) -> bool:
        return state.moves >= self.max_moves


class _GridSource(PuzzleSource):
    def slip(self, random: Random, actions: str) -> str:
        return puzzles.replace_one(random, actions, r"\w", "UDLR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Grid):
    """Where the walker is."""

    free: frozenset[Cell]
    at: Cell
    goal: Cell
    shortest: int  # moves from the first position to the goal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPath(_GridGame[Walk]):
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

    about = puzzles.RULES["plan_path"]

    def read(self, puzzle: str) -> Walk:
        rows = puzzles.parse_rows(puzzle.partition("\n")[2], ".#SG")
        cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
        ends = [[cell for cell, sign in cells.items() if sign == end] for end in "SG"]
        if [len(found) for found in ends] != [1, 1]:
            raise puzzles.BadPuzzle(
                "Plan-Path: expected a grid with one S and one G below its first line"
            )
        free = frozenset(cell for cell, sign in cells.items() if sign != "#")
        start, goal = ends[0][0], ends[1][0]
        way = shortest_way(free, start, goal)
        if way is None:
            raise puzzles.BadPuzzle("Plan-Path: there is no way from S to G")
        return Walk(
            free=free, rows=len(rows), columns=len(rows[0]), at=start, goal=goal, shortest=len(way)
        )

    def show(self, state: Walk) -> str:
        """Both positions, and the grid."""
        (row, column), (goal_row, goal_column) = state.at, state.goal
        return (
            f"S {row + 1} {column + 1} G {goal_row + 1} {goal_column + 1}\n{Game.show(self, state)}"
        )

    def _sign(self, state: Walk, cell: Cell) -> str:
        return {state.goal: "G", state.at: "S"}.get(cell, "." if cell in state.free else "#")

    def _move(self, state: Walk, move: str) -> Played[Walk]:
        to = neighbour(state.at, move)
        possible = to in state.free
        after = replace(state, at=to if possible else state.at, moves=state.moves + 1)
        reward = self.step if possible else self.impossible
        # F = λ (γ Φ(s') − Φ(s)), Φ = −distance to the goal   potential-based shaping, Ng et al. 1999
        reward += self.shaping * (
            distance(state.at, state.goal) - self.gamma * distance(after.at, state.goal)
        )
        if self.solved(after):
            reward += self.goal + (self.shortest if after.moves == after.shortest else 0.0)
        return Played(state=after, reward=reward, impossible=not possible)

    def solved(self, state: Walk) -> bool:
        return state.at == state.goal

    def measure(self, state: Walk) -> Mapping[str, float]:
        """`progress`: share of the shortest way that is behind the walker; `optimal`: solved without a detour."""
        left = len(shortest_way(state.free, state.at, state.goal) or ())
        optimal = self.solved(state) and state.moves == state.shortest
        return {"progress": max(0.0, 1 - left / state.shortest), "optimal": float(optimal)}

    def solve(self, state: Walk) -> str | None:
        way = shortest_way(state.free, state.at, state.goal)
        return None if way is None else " ".join(way)


def shortest_way(free: frozenset[Cell], start: Cell, goal: Cell) -> list[str] | None:
    """The fewest moves through `free` cells from `start` to `goal`, None when there is no way."""
    return puzzles.breadth_first(
        start,
        lambda cell: ((move, to) for move in MOVES if (to := neighbour(cell, move)) in free),
        lambda cell: cell == goal,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPathSource(_GridSource):
    """Square grids; the obstacles are the key, so no split has seen another's map.

    Args:
        size: cells a side.
        obstacles: probability that a cell is an obstacle.
    """

    size: Annotated[int, Field(ge=2, le=100)] = 10
    obstacles: Annotated[float, Field(ge=0, lt=1)] = 0.22

    game, named = "plan_path", "plan_path_{0.size}x{0.size}"

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
        walk = Walk(
            rows=self.size,
            columns=self.size,
            free=frozenset(free),
            at=start,
            goal=goal,
            shortest=len(way),
        )
        return PlanPath().show(walk)


_SIGNS = "#_.$*@+"  # wall, floor, goal, box, box on a goal, player, player on a goal


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanRoom(Grid):
    """Where everything is."""

    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sokoban(_GridGame[SokobanRoom]):
    """Rewards as in Stronger-MAS's released code; there `fail` comes after `max_moves` only."""

    step: float = -0.01
    impossible: float = -0.05  # in place of `step`
    box_on: float = 1.0  # a box is pushed onto a goal
    box_off: float = -0.5  # a box is pushed off a goal, to a cell that is none
    win: float = 10.0
    fail: float = -5.0
    malformed: float = -1.0
    shaping: float = 0.1
    gamma: Share = 0.99
    max_moves: PositiveInt = 200

    about = puzzles.RULES["sokoban"]

    def read(self, puzzle: str) -> SokobanRoom:
        rows = puzzles.parse_rows(puzzle, _SIGNS)
        cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}

        def which(signs: str) -> frozenset[Cell]:
            return frozenset(cell for cell, sign in cells.items() if sign in signs)

        players, boxes, goals = which("@+"), which("$*"), which(".*+")
        if len(players) != 1 or not boxes or len(boxes) != len(goals):
            found = f"{len(players)} players, {len(boxes)} boxes, {len(goals)} goals"
            raise puzzles.BadPuzzle(
                f"Sokoban: {found}; expected one player and as many boxes as goals"
            )
        height, width = len(rows), len(rows[0])
        if any(
            cells[cell] != "#"
            for cell in cells
            if cell[0] in (0, height - 1) or cell[1] in (0, width - 1)
        ):
            raise puzzles.BadPuzzle("Sokoban: expected walls all around the room")
        return SokobanRoom(
            walls=which("#"),
            goals=goals,
            boxes=boxes,
            player=min(players),
            rows=height,
            columns=width,
        )

    def _sign(self, state: SokobanRoom, cell: Cell) -> str:
        if cell in state.walls:
            return "#"
        pair = (
            "@+" if cell == state.player else "$*" if cell in state.boxes else "_."
        )  # off a goal, and on one
        return pair[cell in state.goals]

    def _move(self, state: SokobanRoom, move: str) -> Played[SokobanRoom]:
        pushed = _push(state.walls, state.player, state.boxes, move)
        player, boxes = pushed or (state.player, state.boxes)
        after = replace(state, player=player, boxes=boxes, moves=state.moves + 1)
        reward = self.step if pushed else self.impossible
        home = len(after.boxes & state.goals) - len(state.boxes & state.goals)
        reward += {1: self.box_on, -1: self.box_off, 0: 0.0}[home]
        # F = λ (γ Φ(s') − Φ(s)), Φ = −sum over boxes of the distance to the nearest goal
        reward += self.shaping * (_far(state) - self.gamma * _far(after))
        reward += self.win if self.solved(after) else 0.0
        return Played(state=after, reward=reward, impossible=pushed is None)

    def solved(self, state: SokobanRoom) -> bool:
        return state.boxes == state.goals

    def measure(self, state: SokobanRoom) -> Mapping[str, float]:
        """`progress`: share of the boxes that are on goals."""
        return {"progress": len(state.boxes & state.goals) / len(state.boxes)}

    def solve(self, state: SokobanRoom) -> str | None:
        """The fewest moves; None when the room is lost."""
        moves = puzzles.breadth_first(
            (state.player, state.boxes),
            lambda node: ((move, to) for move in MOVES if (to := _push(state.walls, *node, move))),
            lambda node: node[1] == state.goals,
        )
        return None if moves is None else " ".join(moves)


def _push(
    walls: frozenset[Cell], player: Cell, boxes: frozenset[Cell], move: str
) -> tuple[Cell, frozenset[Cell]] | None:
    to = neighbour(player, move)
    if to in walls:
        return None
    if to not in boxes:
        return to, boxes
    behind = neighbour(to, move)
    return None if behind in walls or behind in boxes else (to, boxes - {to} | {behind})


def _far(state: SokobanRoom) -> int:
    return sum(min(distance(box, goal) for goal in state.goals) for box in state.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanSource(_GridSource):
    """Rooms of Stronger-MAS's size; the walls are the key, so no split has seen another's room.

    Args:
        size: cells a side, walls included.
        boxes: number of boxes.
        walk: steps of the random walk that carves the room.
        turn: probability of a new direction before each step.
        tries: placements of boxes, goals and player in one room, at most.
    """

    size: Annotated[int, Field(ge=4, le=100)] = 6
    boxes: PositiveInt = 1
    walk: PositiveInt = 25
    turn: Share = 0.35
    tries: PositiveInt = 20

    game, named = "sokoban", "sokoban_{0.size}x{0.size}_{0.boxes}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """A room in which no box is home and the solver finds a way; none when `tries` placements have none."""
        floor = self._carve(random)
        if len(floor) < 2 * self.boxes + 1 or not owns(f"sokoban{self.size}{floor}"):
            return None
        rules, size = Sokoban(), self.size
        walls = frozenset(product(range(size), range(size))) - frozenset(floor)
        for _ in range(self.tries):
            *placed, player = random.sample(floor, 2 * self.boxes + 1)
            goals, boxes = frozenset(placed[: self.boxes]), frozenset(placed[self.boxes :])
            room = SokobanRoom(
                walls=walls, goals=goals, boxes=boxes, player=player, rows=size, columns=size
            )
            if rules.solve(room) is not None:
                return rules.show(room)
        return None

    def _carve(self, random: Random) -> list[Cell]:
        side = range(1, self.size - 1)
        inside = set(product(side, side))
        at = (random.choice(side), random.choice(side))
        way = random.choice(list(MOVES))
        floor = {at}
        for _ in range(self.walk):
            if random.random() < self.turn or neighbour(at, way) not in inside:
                way = random.choice(list(MOVES))
            # the walk is two cells wide: a box in a corridor of one cell can hardly be walked around
            floor |= {neighbour(at, way), neighbour(at, random.choice(list(MOVES)))} & inside
            at = neighbour(at, way) if neighbour(at, way) in floor else at
        return sorted(floor)
