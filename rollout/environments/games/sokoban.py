"""Sokoban (game): push every box onto a goal (rewards of Stronger-MAS)."""

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

_SIGNS = "#_.$*@+"  # wall, floor, goal, box, box on a goal, player, player on a goal


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanRoom:
    """Where everything is."""

    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell
    rows: int
    columns: int
    moves: int = 0  # made so far, impossible ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Sokoban(Game[SokobanRoom]):
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

    about = (
        "Push every box onto a goal: # wall, _ floor, . goal, $ box, * box on a goal, @ you, + you on a goal. A "
        "move goes one cell up (U), down (D), left (L) or right (R) and pushes a box that is there, if the cell "
        "behind it is neither wall nor box; boxes cannot be pulled.\nActions: moves, for example U L L"
    )

    def read(self, puzzle: str) -> SokobanRoom:
        """The first state.

        Raises:
            BadPuzzle: the text is no walled room with one player and as many boxes as goals.
        """
        rows = parse_rows(puzzle, _SIGNS)
        cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}

        def which(signs: str) -> frozenset[Cell]:
            return frozenset(cell for cell, sign in cells.items() if sign in signs)

        players, boxes, goals = which("@+"), which("$*"), which(".*+")
        if len(players) != 1 or not boxes or len(boxes) != len(goals):
            raise BadPuzzle(
                f"Sokoban: {len(players)} players, {len(boxes)} boxes, {len(goals)} goals; "
                "expected one player and as many boxes as goals"
            )
        height, width = len(rows), len(rows[0])
        if any(cells[cell] != "#" for cell in cells if cell[0] in (0, height - 1) or cell[1] in (0, width - 1)):
            raise BadPuzzle("Sokoban: expected walls all around the room")
        (player,) = players
        return SokobanRoom(walls=which("#"), goals=goals, boxes=boxes, player=player, rows=height, columns=width)

    def board(self, state: SokobanRoom) -> list[list[str]]:
        """The room, a sign a cell."""

        def sign(cell: Cell) -> str:
            if cell in state.walls:
                return "#"
            thing = "player" if cell == state.player else "box" if cell in state.boxes else ""
            return {"player": "@+", "box": "$*", "": "_."}[thing][cell in state.goals]

        return [[sign((r, c)) for c in range(state.columns)] for r in range(state.rows)]

    def play(self, state: SokobanRoom, actions: str) -> Played[SokobanRoom] | None:
        """Move and push; moves after the last box is home are not made."""
        moves = letters(actions, "UDLR")
        return one_by_one(self, state, moves, self._move) if moves else None

    def _move(self, state: SokobanRoom, move: str) -> Played[SokobanRoom]:
        pushed = _push(state.walls, state.boxes, state.player, move)
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
        """Whether every box is on a goal."""
        return state.boxes == state.goals

    def spent(self, state: SokobanRoom) -> bool:
        """Whether `max_moves` are made."""
        return state.moves >= self.max_moves

    def measure(self, state: SokobanRoom) -> Mapping[str, float]:
        """`progress`: share of the boxes that are on goals."""
        return {"progress": len(state.boxes & state.goals) / len(state.boxes)}

    def solve(self, state: SokobanRoom) -> str | None:
        """The fewest moves; None when the room is lost."""

        def after(node: tuple[Cell, frozenset[Cell]]) -> list[tuple[str, tuple[Cell, frozenset[Cell]]]]:
            player, boxes = node
            steps = ((move, _push(state.walls, boxes, player, move)) for move in MOVES)
            return [(move, to) for move, to in steps if to is not None]

        moves = breadth_first((state.player, state.boxes), after, lambda node: node[1] == state.goals)
        return None if moves is None else " ".join(moves)


def _push(
    walls: frozenset[Cell], boxes: frozenset[Cell], player: Cell, move: str
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
class SokobanSource(PuzzleSource):
    """Rooms of Stronger-MAS's size; the walls are the key, so no split has seen another's room."""

    size: Annotated[int, Field(ge=4)] = 6  # cells a side, walls included
    boxes: PositiveInt = 1
    walk: PositiveInt = 25  # steps of the walk
    turn: Share = 0.35  # probability of a new direction before each step
    tries: PositiveInt = 20  # placements of boxes, goals and player in one room

    game = "sokoban"

    @property
    def name(self) -> str:
        return f"sokoban_{self.size}x{self.size}_{self.boxes}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """A room in which no box is home and the solver finds a way; none when `tries` placements have none."""
        floor = self._carve(random)
        if len(floor) < 2 * self.boxes + 1 or not owns(f"sokoban{self.size}{floor}"):
            return None
        rules = Sokoban()
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        for _ in range(self.tries):
            placed = random.sample(floor, 2 * self.boxes + 1)
            room = SokobanRoom(
                walls=frozenset(cells) - frozenset(floor),
                goals=frozenset(placed[: self.boxes]),
                boxes=frozenset(placed[self.boxes : -1]),
                player=placed[-1],
                rows=self.size,
                columns=self.size,
            )
            if rules.solve(room) is not None:
                return rules.show(room)
        return None

    def slip(self, random: Random, actions: str) -> str:
        """One move in another direction."""
        return replace_one(random, actions, r"\w", "UDLR")

    def _carve(self, random: Random) -> list[Cell]:
        inside = range(1, self.size - 1)
        at = (random.choice(inside), random.choice(inside))
        way = random.choice(list(MOVES))
        floor = {at}
        for _ in range(self.walk):
            if random.random() < self.turn or not _within(neighbour(at, way), inside):
                way = random.choice(list(MOVES))
            # the walk is two cells wide: a box in a corridor of one cell can hardly be walked around
            for cell in (neighbour(at, way), neighbour(at, random.choice(list(MOVES)))):
                if _within(cell, inside):
                    floor.add(cell)
            ahead = neighbour(at, way)
            at = ahead if ahead in floor else at
        return sorted(floor)


def _within(cell: Cell, inside: range) -> bool:
    return cell[0] in inside and cell[1] in inside
