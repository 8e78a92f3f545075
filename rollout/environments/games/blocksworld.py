"""Blocksworld (game): rebuild stacks of blocks, one block at a time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product, zip_longest
from random import Random
from string import ascii_uppercase
from typing import Annotated

from pydantic import Field

from rollout.environments.games import game as puzzles
from rollout.environments.games.game import Game, Owns, Played, PuzzleSource

Stacks = frozenset[tuple[str, ...]]  # each from the table upwards
_TABLE = "table"
_TEXT = re.compile(r"now: (.+)\ngoal: (.+)")
_BLOCK = re.compile(r"[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksTable:
    """The stacks as they are and as they shall be."""

    now: Stacks
    goal: Stacks
    shortest: int  # moves from the first state
    moves: int = 0  # made so far, impossible ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocksworld(Game[BlocksTable]):
    """1 for the goal and 0 for anything else, as in Stronger-MAS's released code."""

    solved_reward: float = 1.0
    fail: float = 0.0
    malformed: float = -1.0

    about = puzzles.RULES["blocksworld"]

    def read(self, puzzle: str) -> BlocksTable:
        match = _TEXT.fullmatch(puzzle)
        now, goal = (
            (_parse(side) for side in match.groups()) if match else (frozenset(), frozenset())
        )
        blocks = sorted(block for stack in now for block in stack)
        if (
            not blocks
            or blocks != sorted(block for stack in goal for block in stack)
            or len({*blocks}) < len(blocks)
        ):
            raise puzzles.BadPuzzle(
                "Blocksworld: expected lines 'now: A B | C' and 'goal: C B A' with the same blocks"
            )
        return BlocksTable(now=now, goal=goal, shortest=len(_plan(now, goal)))

    def show(self, state: BlocksTable) -> str:
        return f"now: {show_stacks(state.now)}\ngoal: {show_stacks(state.goal)}"

    def board(self, state: BlocksTable) -> list[list[str]]:
        """The stacks as they are, side by side, on a line of # for the table."""
        stacks = sorted(state.now)
        layers = list(zip_longest(*stacks, fillvalue="."))
        return [*(list(layer) for layer in reversed(layers)), ["#"] * len(stacks)]

    def play(self, state: BlocksTable, actions: str) -> Played[BlocksTable] | None:
        """Move blocks; moves after the goal is reached are not made."""
        moves = [action.split() for action in puzzles.items(actions)]
        if not moves or any(len(move) != 2 for move in moves):
            return None
        played = puzzles.one_by_one(self, state, moves, _move)
        return replace(played, reward=self.solved_reward if self.solved(played.state) else 0.0)

    def solved(self, state: BlocksTable) -> bool:
        return state.now == state.goal

    def measure(self, state: BlocksTable) -> Mapping[str, float]:
        """`progress`: share of the blocks that stand, down to the table, on what they shall; `optimal`: no detour."""
        targets = {stack[: i + 1] for stack in state.goal for i in range(len(stack))}
        standing = [stack[: i + 1] for stack in state.now for i in range(len(stack))]
        optimal = self.solved(state) and state.moves == state.shortest
        return {
            "progress": sum(part in targets for part in standing) / len(standing),
            "optimal": float(optimal),
        }

    def solve(self, state: BlocksTable) -> str | None:
        return ", ".join(_plan(state.now, state.goal))


def show_stacks(stacks: Stacks) -> str:
    """Stacks on one line, in the order of the alphabet."""
    return " | ".join(" ".join(stack) for stack in sorted(stacks))


def _parse(side: str) -> Stacks:
    stacks = [tuple(stack.split()) for stack in side.split("|")]
    legal = all(stack and all(_BLOCK.fullmatch(block) for block in stack) for stack in stacks)
    return frozenset(stacks) if legal else frozenset()


@lru_cache(maxsize=1024)
def _plan(now: Stacks, goal: Stacks) -> tuple[str, ...]:
    moves = puzzles.breadth_first(now, _moves, lambda stacks: stacks == goal)
    assert moves is not None, "every stacking can be reached from every other"
    return tuple(moves)


def _move(state: BlocksTable, move: Sequence[str]) -> Played[BlocksTable]:
    after = dict(_moves(state.now)).get(" ".join(move))
    moved = replace(state, now=after or state.now, moves=state.moves + 1)
    return Played(state=moved, reward=0.0, impossible=after is None)


def _moves(stacks: Stacks) -> list[tuple[str, Stacks]]:
    """(move, stacks after it) of every possible move."""
    found = []
    for stack in sorted(stacks):
        rest, top = stack[:-1], stack[-1]
        without = stacks - {stack} | ({rest} if rest else set())
        found += [
            (f"{top} {other[-1]}", without - {other} | {(*other, top)})
            for other in sorted(stacks - {stack})
        ]
        if rest:
            found.append((f"{top} {_TABLE}", without | {(top,)}))
    return found


_LISTED = 4  # blocks up to which every pair is listed: 73 stackings of 4, 501 of 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksworldSource(PuzzleSource):
    """Every pair of different stackings of `blocks` blocks; the pair is the key.

    Args:
        blocks: number of blocks.
    """

    blocks: Annotated[int, Field(ge=2, le=6)] = (
        4  # shortest plans are found by search, which takes seconds for 7
    )

    game, named = "blocksworld", "blocksworld_{0.blocks}"

    def draw(self, random: Random, owns: Owns) -> str | None:
        """Two different stackings out of all."""
        text = _text(*random.sample(_stackings(self.blocks), 2))
        return text if owns(text) else None

    def everything(self) -> tuple[tuple[str, str], ...] | None:
        return _pairs(self.blocks) if self.blocks <= _LISTED else None

    def slip(self, random: Random, actions: str) -> str:
        return puzzles.replace_one(
            random, actions, r"\b\w+(?=,|$)", [*ascii_uppercase[: self.blocks], _TABLE]
        )


@lru_cache(maxsize=8)
def _stackings(blocks: int) -> tuple[Stacks, ...]:
    """Every set of stacks of the first `blocks` letters, in the order of their text."""
    found = set()
    for order in permutations(ascii_uppercase[:blocks]):
        for cuts in product((False, True), repeat=blocks - 1):
            stacks: list[tuple[str, ...]] = [order[:1]]
            for block, cut in zip(order[1:], cuts, strict=True):
                stacks = [*stacks, (block,)] if cut else [*stacks[:-1], (*stacks[-1], block)]
            found.add(frozenset(stacks))
    return tuple(sorted(found, key=show_stacks))


@lru_cache(maxsize=4)
def _pairs(blocks: int) -> tuple[tuple[str, str], ...]:
    texts = (_text(now, goal) for now, goal in permutations(_stackings(blocks), 2))
    return tuple((text, text) for text in texts)


def _text(now: Stacks, goal: Stacks) -> str:
    return f"now: {show_stacks(now)}\ngoal: {show_stacks(goal)}"
