"""Grid games of Stronger-MAS: Plan-Path and Sokoban.

In Plan-Path, a walker moves from S to G around obstacles. In Sokoban, a player pushes boxes onto
goals.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    """Return the cell that is one move away."""
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def distance(one: Cell, other: Cell) -> int:
    """Return the Manhattan distance of two cells."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Base class of the states of grid games.

    Attributes:
        rows: number of rows.
        columns: number of columns.
        moves: number of moves so far, impossible ones included.
    """

    rows: int
    columns: int
    moves: int = 0


_Grid = TypeVar("_Grid", bound=Grid)


class _GridGame(Game[_Grid]):
    """Game whose actions are moves on a grid, which ends after `max_moves` moves."""

    max_moves: int

    def play(self, state: _Grid, actions: str) -> Played[_Grid] | None:
        moves = puzzles.parse_letters(actions, "UDLR")
        return puzzles.play_one_by_one(self, state, moves, self._move) if moves else None

    def _move(self, state: _Grid, move: str) -> Played[_Grid]:
        """Make one move, which may be impossible."""
        raise NotImplementedError

    def board(self, state: _Grid) -> list[list[str]]:
        rows = []
        for row in range(state.rows):
            rows.append([self._sign(state, (row, column)) for column in range(state.columns)])
        return rows

    def _sign(self, state: _Grid, cell: Cell) -> str:
        """Return the sign of a cell on the board."""
        raise NotImplementedError

    def spent(self, state: _Grid) -> bool:
        return state.moves >= self.max_moves


class _GridSource(PuzzleSource):
    """Generator of puzzles whose actions are moves on a grid."""

    def slip(self, random: Random, actions: str) -> str:
        return puzzles.replace_one(random, actions, r"\w", "UDLR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Grid):
    """State of Plan-Path.

    Attributes:
        free: cells without an obstacle.
        position: cell of the walker.
        goal_cell: cell that the walker has to reach.
        fewest_moves: number of moves of a shortest path from the first position to the goal.
    """

    free: frozenset[Cell]
    position: Cell
    goal_cell: Cell
    fewest_moves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPath(_GridGame[Walk]):
    """Rules of Plan-Path with the rewards of Stronger-MAS's released code.

    Args:
        step: reward of a move.
        impossible: reward of a move against an obstacle or the border, instead of `step`.
        goal: reward that is added when the goal is reached.
        shortest: reward that is also added if the goal is reached in the fewest moves.
        fail: reward that is added if the game ends without a solution, after `max_moves` or after
            the last turn. The released code adds it after `max_moves` only.
        malformed: reward of a text that is not a list of moves.
        shaping: factor λ of the potential-based shaping.
        gamma: discount γ of the shaping.
        max_moves: number of moves after which the game ends.
    """

    step: float = -0.01
    impossible: float = -0.1
    goal: float = 1.0
    shortest: float = 0.5
    fail: float = -1.0
    malformed: float = -1.0
    shaping: float = 1.0
    gamma: Share = 0.99
    max_moves: PositiveInt = 10_000

    about = puzzles.RULES["plan_path"]

    def read(self, puzzle: str) -> Walk:
        positions, _, grid = puzzle.partition("\n")
        rows = puzzles.parse_rows(grid, ".#SG")
        cells = _cells_of(rows)
        starts = [cell for cell, sign in cells.items() if sign == "S"]
        goals = [cell for cell, sign in cells.items() if sign == "G"]
        if len(starts) != 1 or len(goals) != 1:
            raise puzzles.BadPuzzle(
                "Plan-Path: expected the positions of S and G, and below them a grid with one S and one G"
            )
        free = frozenset(cell for cell, sign in cells.items() if sign != "#")
        path = shortest_path(free, starts[0], goals[0])
        if path is None:
            raise puzzles.BadPuzzle("Plan-Path: there is no way from S to G")
        walk = Walk(
            free=free,
            rows=len(rows),
            columns=len(rows[0]),
            position=starts[0],
            goal_cell=goals[0],
            fewest_moves=len(path),
        )
        if positions.split() != _positions_line(walk).split():
            raise puzzles.BadPuzzle(
                f"Plan-Path: the first line is '{positions[:80]}'; expected '{_positions_line(walk)}', "
                "the positions of S and G in the grid below it"
            )
        return walk

    def show(self, state: Walk) -> str:
        """Return the positions of walker and goal, and the grid."""
        return f"{_positions_line(state)}\n{Game.show(self, state)}"

    def _sign(self, state: Walk, cell: Cell) -> str:
        if cell == state.position:
            return "S"
        if cell == state.goal_cell:
            return "G"
        return "." if cell in state.free else "#"

    def _move(self, state: Walk, move: str) -> Played[Walk]:
        target = neighbour(state.position, move)
        possible = target in state.free
        position = target if possible else state.position
        after = replace(state, position=position, moves=state.moves + 1)

        reward = self.step if possible else self.impossible
        # F = λ (γ Φ(s') − Φ(s)), Φ = −distance to the goal: potential-based shaping, Ng et al. 1999
        reward += self.shaping * (
            distance(state.position, state.goal_cell)
            - self.gamma * distance(after.position, state.goal_cell)
        )
        if self.solved(after):
            reward += self.goal
            if after.moves == after.fewest_moves:
                reward += self.shortest
        return Played(state=after, reward=reward, impossible_actions=0 if possible else 1)

    def solved(self, state: Walk) -> bool:
        return state.position == state.goal_cell

    def measure(self, state: Walk) -> Mapping[str, float]:
        """Return `progress` and `optimal`.

        `progress` is 1 - (fewest moves from here to the goal) / (fewest moves from the start), or 0
        if the walker is farther from the goal than at the start. `optimal` is 1 if the puzzle is
        solved in the fewest moves.
        """
        path = shortest_path(state.free, state.position, state.goal_cell)
        assert path is not None, "read() accepts only grids in which the goal can be reached"
        progress = max(0.0, 1 - len(path) / state.fewest_moves)
        optimal = self.solved(state) and state.moves == state.fewest_moves
        return {"progress": progress, "optimal": float(optimal)}

    def solve(self, state: Walk) -> str | None:
        path = shortest_path(state.free, state.position, state.goal_cell)
        return None if path is None else " ".join(path)


def _positions_line(walk: Walk) -> str:
    """Return the positions of walker and goal: rows and columns, counted from 1."""
    row, column = walk.position
    goal_row, goal_column = walk.goal_cell
    return f"S {row + 1} {column + 1} G {goal_row + 1} {goal_column + 1}"


def shortest_path(free: frozenset[Cell], start: Cell, goal: Cell) -> list[str] | None:
    """Return a shortest list of moves through free cells from start to goal; None if there is none."""

    def successors(cell: Cell) -> Iterator[tuple[str, Cell]]:
        for move in MOVES:
            target = neighbour(cell, move)
            if target in free:
                yield move, target

    return puzzles.breadth_first(start, successors, lambda cell: cell == goal)


def _cells_of(rows: Sequence[Sequence[str]]) -> dict[Cell, str]:
    """Return the sign of each cell."""
    return {
        (row_number, column): sign
        for row_number, row in enumerate(rows)
        for column, sign in enumerate(row)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPathSource(_GridSource):
    """Generator of square grids of Plan-Path.

    The key of a puzzle is its set of obstacles, so no two splits share a map.

    Args:
        size: number of cells of a side.
        obstacles: probability that a cell is an obstacle.
    """

    size: Annotated[int, Field(ge=2, le=100)] = 10
    obstacles: Annotated[float, Field(ge=0, lt=1)] = 0.22

    game = "plan_path"
    name_format = "plan_path_{0.size}x{0.size}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Draw obstacles and two free cells with a path between them."""
        cells: list[Cell] = list(product(range(self.size), range(self.size)))
        free = [cell for cell in cells if random.random() >= self.obstacles]
        if len(free) < 2 or not owns(f"plan_path{self.size}{free}"):
            return None
        start, goal = random.sample(free, 2)
        path = shortest_path(frozenset(free), start, goal)
        if path is None:
            return None
        walk = Walk(
            rows=self.size,
            columns=self.size,
            free=frozenset(free),
            position=start,
            goal_cell=goal,
            fewest_moves=len(path),
        )
        return PlanPath().show(walk)


_SIGNS = "#_.$*@+"  # wall, floor, goal, box, box on a goal, player, player on a goal
_PlayerAndBoxes = tuple[Cell, frozenset[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanRoom(Grid):
    """State of Sokoban: cells of walls, goals, boxes and the player."""

    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sokoban(_GridGame[SokobanRoom]):
    """Rules of Sokoban with the rewards of Stronger-MAS's released code.

    Args:
        step: reward of a move.
        impossible: reward of a move that is not possible, instead of `step`.
        box_on: reward that is added if a push increases the number of boxes on goals.
        box_off: reward that is added if a push decreases the number of boxes on goals.
        win: reward that is added when all boxes are on goals.
        fail: reward that is added if the game ends without a solution, after `max_moves` or after
            the last turn. The released code adds it after `max_moves` only.
        malformed: reward of a text that is not a list of moves.
        shaping: factor λ of the potential-based shaping.
        gamma: discount γ of the shaping.
        max_moves: number of moves after which the game ends.
    """

    step: float = -0.01
    impossible: float = -0.05
    box_on: float = 1.0
    box_off: float = -0.5
    win: float = 10.0
    fail: float = -5.0
    malformed: float = -1.0
    shaping: float = 0.1
    gamma: Share = 0.99
    max_moves: PositiveInt = 200

    about = puzzles.RULES["sokoban"]

    def read(self, puzzle: str) -> SokobanRoom:
        rows = puzzles.parse_rows(puzzle, _SIGNS)
        cells = _cells_of(rows)

        def cells_with(signs: str) -> frozenset[Cell]:
            return frozenset(cell for cell, sign in cells.items() if sign in signs)

        walls = cells_with("#")
        players = cells_with("@+")
        boxes = cells_with("$*")
        goals = cells_with(".*+")
        if len(players) != 1 or not boxes or len(boxes) != len(goals):
            raise puzzles.BadPuzzle(
                f"Sokoban: {len(players)} players, {len(boxes)} boxes, {len(goals)} goals; "
                "expected one player, at least one box, and as many goals as boxes"
            )
        (player,) = players
        height = len(rows)
        width = len(rows[0])
        for row, column in cells:
            on_border = row in (0, height - 1) or column in (0, width - 1)
            if on_border and (row, column) not in walls:
                raise puzzles.BadPuzzle("Sokoban: expected walls all around the room")
        return SokobanRoom(
            walls=walls,
            goals=goals,
            boxes=boxes,
            player=player,
            rows=height,
            columns=width,
        )

    def _sign(self, state: SokobanRoom, cell: Cell) -> str:
        if cell in state.walls:
            return "#"
        on_goal = cell in state.goals
        if cell == state.player:
            return "+" if on_goal else "@"
        if cell in state.boxes:
            return "*" if on_goal else "$"
        return "." if on_goal else "_"

    def _move(self, state: SokobanRoom, move: str) -> Played[SokobanRoom]:
        moved = _player_and_boxes_after(move, state.walls, state.player, state.boxes)
        possible = moved is not None
        player, boxes = moved or (state.player, state.boxes)
        after = replace(state, player=player, boxes=boxes, moves=state.moves + 1)

        reward = self.step if possible else self.impossible
        boxes_on_goals_before = len(state.boxes & state.goals)
        boxes_on_goals = len(after.boxes & after.goals)
        if boxes_on_goals > boxes_on_goals_before:
            reward += self.box_on
        elif boxes_on_goals < boxes_on_goals_before:
            reward += self.box_off
        # F = λ (γ Φ(s') − Φ(s)), Φ = −sum over boxes of the distance to the nearest goal
        reward += self.shaping * (_box_distance(state) - self.gamma * _box_distance(after))
        if self.solved(after):
            reward += self.win
        return Played(state=after, reward=reward, impossible_actions=0 if possible else 1)

    def solved(self, state: SokobanRoom) -> bool:
        return state.boxes == state.goals

    def measure(self, state: SokobanRoom) -> Mapping[str, float]:
        """Return `progress`: share of the boxes that are on goals."""
        return {"progress": len(state.boxes & state.goals) / len(state.boxes)}

    def solve(self, state: SokobanRoom) -> str | None:
        """Return a shortest list of moves; None if the room can no longer be solved."""

        def successors(node: _PlayerAndBoxes) -> Iterator[tuple[str, _PlayerAndBoxes]]:
            player, boxes = node
            for move in MOVES:
                moved = _player_and_boxes_after(move, state.walls, player, boxes)
                if moved is not None:
                    yield move, moved

        start = (state.player, state.boxes)
        moves = puzzles.breadth_first(start, successors, lambda node: node[1] == state.goals)
        return None if moves is None else " ".join(moves)


def _player_and_boxes_after(
    move: str, walls: frozenset[Cell], player: Cell, boxes: frozenset[Cell]
) -> _PlayerAndBoxes | None:
    """Return player and boxes after a move, which may push a box; None if it is impossible."""
    target = neighbour(player, move)
    if target in walls:
        return None
    if target not in boxes:
        return target, boxes
    behind = neighbour(target, move)
    if behind in walls or behind in boxes:
        return None
    return target, boxes - {target} | {behind}


def _box_distance(state: SokobanRoom) -> int:
    """Return the sum over the boxes of the distance to the nearest goal."""
    return sum(min(distance(box, goal) for goal in state.goals) for box in state.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanSource(_GridSource):
    """Generator of rooms of Sokoban, by default of the size that Stronger-MAS uses.

    The key of a puzzle is its set of walls, so no two splits share a room.

    Args:
        size: number of cells of a side, including the walls.
        boxes: number of boxes.
        walk: number of steps of the random walk that carves the room.
        turn: probability of a new direction before each step.
        tries: largest number of placements of boxes, goals and player that are tried in one room.
    """

    size: Annotated[int, Field(ge=4, le=100)] = 6
    boxes: PositiveInt = 1
    walk: PositiveInt = 25
    turn: Share = 0.35
    tries: PositiveInt = 20

    game = "sokoban"
    name_format = "sokoban_{0.size}x{0.size}_{0.boxes}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Draw a room, and place boxes, goals and player in it up to `tries` times until it can be solved."""
        floor = self._carve(random)
        if len(floor) < 2 * self.boxes + 1 or not owns(f"sokoban{self.size}{floor}"):
            return None
        rules = Sokoban()
        walls = frozenset(product(range(self.size), range(self.size))) - frozenset(floor)
        for _ in range(self.tries):
            *goals_and_boxes, player = random.sample(floor, 2 * self.boxes + 1)
            room = SokobanRoom(
                walls=walls,
                goals=frozenset(goals_and_boxes[: self.boxes]),
                boxes=frozenset(goals_and_boxes[self.boxes :]),
                player=player,
                rows=self.size,
                columns=self.size,
            )
            if rules.solve(room) is not None:
                return rules.show(room)
        return None

    def _carve(self, random: Random) -> list[Cell]:
        """Return the cells of the floor, which a random walk makes."""
        moves = list(MOVES)
        side = range(1, self.size - 1)
        inside = set(product(side, side))
        position = (random.choice(side), random.choice(side))
        direction = random.choice(moves)
        floor = {position}
        for _ in range(self.walk):
            if random.random() < self.turn or neighbour(position, direction) not in inside:
                direction = random.choice(moves)
            ahead = neighbour(position, direction)
            # A second neighbour is carved too, because a player can hardly get around a box in a
            # corridor that is one cell wide.
            second = neighbour(position, random.choice(moves))
            floor |= {ahead, second} & inside
            if ahead in inside:
                position = ahead
        return sorted(floor)
