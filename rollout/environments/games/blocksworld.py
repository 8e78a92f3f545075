"""The game Blocksworld: rebuild stacks of blocks, one block at a time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, permutations, product, zip_longest
from random import Random
from string import ascii_uppercase
from typing import Annotated

from pydantic import Field

from rollout.environments.games import game as puzzles
from rollout.environments.games.game import Game, Owns, Played, PuzzleSource

Stacks = frozenset[tuple[str, ...]]  # blocks of each stack from the table upwards
_TABLE = "table"
_TEXT = re.compile(r"now: (.+)\ngoal: (.+)")
_BLOCK = re.compile(r"[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksTable:
    """Current stacks and goal.

    Attributes:
        fewest_moves: number of moves of a shortest plan from the first state to the goal.
        moves: number of moves so far, impossible ones included.
    """

    now: Stacks
    goal: Stacks
    fewest_moves: int
    moves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocksworld(Game[BlocksTable]):
    """Rules of Blocksworld with the rewards of Stronger-MAS's released code.

    Args:
        solved_reward: reward of a list of moves that reaches the goal; other lists have the reward 0.
        fail: reward that is added if the game ends without a solution.
        malformed: reward of a text that is not a list of moves.
    """

    solved_reward: float = 1.0
    fail: float = 0.0
    malformed: float = -1.0

    about = puzzles.RULES["blocksworld"]

    def read(self, puzzle: str) -> BlocksTable:
        match = _TEXT.fullmatch(puzzle)
        now = _parse_stacks(match[1]) if match else frozenset()
        goal = _parse_stacks(match[2]) if match else frozenset()
        if not now or set(chain(*now)) != set(chain(*goal)):
            raise puzzles.BadPuzzle(
                "Blocksworld: expected lines 'now: A B | C' and 'goal: C B A' with the same blocks"
            )
        return BlocksTable(now=now, goal=goal, fewest_moves=len(_plan(now, goal)))

    def show(self, state: BlocksTable) -> str:
        return f"now: {show_stacks(state.now)}\ngoal: {show_stacks(state.goal)}"

    def board(self, state: BlocksTable) -> list[list[str]]:
        """Return the current stacks side by side, on a row of # for the table."""
        stacks = sorted(state.now)
        layers = list(zip_longest(*stacks, fillvalue="."))
        return [*(list(layer) for layer in reversed(layers)), ["#"] * len(stacks)]

    def play(self, state: BlocksTable, actions: str) -> Played[BlocksTable] | None:
        """Make the moves in order, until the goal is reached."""
        moves = [action.split() for action in puzzles.parse_actions(actions)]
        if not moves or any(len(move) != 2 for move in moves):
            return None
        played = puzzles.play_one_by_one(self, state, moves, _move)
        reward = self.solved_reward if self.solved(played.state) else 0.0
        return replace(played, reward=reward)

    def solved(self, state: BlocksTable) -> bool:
        return state.now == state.goal

    def measure(self, state: BlocksTable) -> Mapping[str, float]:
        """Return `progress` and `optimal`.

        `progress` is the share of the blocks that stand as in the goal, with all blocks below them.
        `optimal` is 1 if the puzzle is solved in the fewest moves.
        """
        parts = _bottom_parts(state.now)
        goal_parts = set(_bottom_parts(state.goal))
        # A block stands as in the goal if the goal has the same part, from the table up to the block.
        placed_blocks = sum(part in goal_parts for part in parts)
        blocks = len(parts)
        optimal = self.solved(state) and state.moves == state.fewest_moves
        return {"progress": placed_blocks / blocks, "optimal": float(optimal)}

    def solve(self, state: BlocksTable) -> str | None:
        return ", ".join(_plan(state.now, state.goal))


def show_stacks(stacks: Stacks) -> str:
    """Return the stacks on one line in alphabetical order."""
    return " | ".join(" ".join(stack) for stack in sorted(stacks))


def _bottom_parts(stacks: Stacks) -> list[tuple[str, ...]]:
    """Return, for every block, the part of its stack from the table up to the block."""
    parts = []
    for stack in stacks:
        parts += [stack[: height + 1] for height in range(len(stack))]
    return parts


def _parse_stacks(text: str) -> Stacks:
    """Parse a line such as `A B | C`; return the empty set if it is not a legal one.

    Every stack needs a block, every block is a capital letter, and no block is named twice.
    """
    stacks = [tuple(stack.split()) for stack in text.split("|")]
    blocks = list(chain(*stacks))
    if not all(stacks) or not all(_BLOCK.fullmatch(block) for block in blocks):
        return frozenset()
    if len(set(blocks)) < len(blocks):
        return frozenset()
    return frozenset(stacks)


@lru_cache(maxsize=1024)
def _plan(now: Stacks, goal: Stacks) -> tuple[str, ...]:
    """Return a shortest list of moves from one stacking to another."""
    moves = puzzles.breadth_first(now, _moves, lambda stacks: stacks == goal)
    assert moves is not None, "every stacking can be reached from every other"
    return tuple(moves)


def _move(state: BlocksTable, move: Sequence[str]) -> Played[BlocksTable]:
    """Make one move, which may be impossible."""
    stacks = dict(_moves(state.now)).get(" ".join(move))
    if stacks is None:
        after = replace(state, moves=state.moves + 1)
        return Played(state=after, reward=0.0, impossible_actions=1)
    after = replace(state, now=stacks, moves=state.moves + 1)
    return Played(state=after, reward=0.0)


def _moves(stacks: Stacks) -> list[tuple[str, Stacks]]:
    """Return (move, stacks after the move) for every possible move.

    A move is a block on top of a stack, and the block or the table to put it on: `A B`, `A table`.
    """
    moves = []
    for stack in sorted(stacks):
        rest = stack[:-1]
        top = stack[-1]
        without_top = stacks - {stack}
        if rest:
            without_top |= {rest}
        for target in sorted(stacks - {stack}):
            without_target = without_top - {target}
            moves.append((f"{top} {target[-1]}", without_target | {(*target, top)}))
        if rest:
            moves.append((f"{top} {_TABLE}", without_top | {(top,)}))
    return moves


_MAX_LISTED_BLOCKS = 4  # 4 blocks have 73 stackings and 5 have 501; puzzles are pairs of them


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksworldSource(PuzzleSource):
    """Generator of puzzles: a stacking of the blocks, and a different one as the goal.

    The key of a puzzle is its text, so no two splits share a puzzle.

    Args:
        blocks: number of blocks.
    """

    # The search for a shortest plan takes seconds for 7 blocks.
    blocks: Annotated[int, Field(ge=2, le=6)] = 4

    game = "blocksworld"
    name_format = "blocksworld_{0.blocks}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Draw two different stackings."""
        text = _puzzle(*random.sample(_stackings(self.blocks), 2))
        return text if owns(text) else None

    def all_puzzles(self) -> tuple[tuple[str, str], ...] | None:
        return _all_puzzles(self.blocks) if self.blocks <= _MAX_LISTED_BLOCKS else None

    def slip(self, random: Random, actions: str) -> str:
        # The pattern matches the last word of a move, its destination.
        return puzzles.replace_one(
            random, actions, r"\b\w+(?=,|$)", [*ascii_uppercase[: self.blocks], _TABLE]
        )


@lru_cache(maxsize=8)
def _stackings(blocks: int) -> tuple[Stacks, ...]:
    """Return every way to stack the first `blocks` letters, in the order of their texts."""
    stackings = set()
    for order in permutations(ascii_uppercase[:blocks]):
        # A block after a cut begins a new stack; every other one stands on the block before it.
        for cuts in product((False, True), repeat=blocks - 1):
            stacks: list[tuple[str, ...]] = [order[:1]]
            for block, cut in zip(order[1:], cuts, strict=True):
                if cut:
                    stacks.append((block,))
                else:
                    stacks[-1] = (*stacks[-1], block)
            stackings.add(frozenset(stacks))
    return tuple(sorted(stackings, key=show_stacks))


@lru_cache(maxsize=4)
def _all_puzzles(blocks: int) -> tuple[tuple[str, str], ...]:
    """Return (key, puzzle) of every puzzle; the puzzle is its own key."""
    texts = (_puzzle(now, goal) for now, goal in permutations(_stackings(blocks), 2))
    return tuple((text, text) for text in texts)


def _puzzle(now: Stacks, goal: Stacks) -> str:
    """Return the text of a puzzle, as `Blocksworld.show` writes its first state."""
    return f"now: {show_stacks(now)}\ngoal: {show_stacks(goal)}"
