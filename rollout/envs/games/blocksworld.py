"""Blocksworld: rebuild stacks of blocks, one block at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from rollout.envs.games.actions import items
from rollout.envs.games.game import BadPuzzle, Played, one_by_one
from rollout.envs.games.grid import breadth_first

Stacks = frozenset[tuple[str, ...]]  # each from the table upwards
TABLE = "table"
_TEXT = re.compile(r"now: (.+)\ngoal: (.+)")
_BLOCK = re.compile(r"[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The stacks as they are and as they shall be."""

    now: Stacks
    goal: Stacks
    shortest: int  # moves from the first state
    moves: int = 0  # made so far, impossible ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocksworld:
    """1 for the goal and 0 for anything else, as in Stronger-MAS's released code."""

    solved_reward: float = 1.0
    fail: float = 0.0
    malformed: float = -1.0

    @property
    def about(self) -> str:
        """The rules and the form of an action list."""
        return (
            "Rebuild the stacks: from what is now to the goal. A stack is written from the table upwards, stacks are "
            "separated by |, and their order does not matter. A move takes the top block of a stack and puts it on the "
            "top of another one, or on the table. Make as few moves as possible.\n"
            "Actions: moves as block and destination, for example C table, B C"
        )

    def read(self, puzzle: str) -> Table:
        """The first state.

        Raises:
            BadPuzzle: the text is no pair of stackings of the same blocks.
        """
        match = _TEXT.fullmatch(puzzle)
        now, goal = (_parse(side) for side in match.groups()) if match else (frozenset(), frozenset())
        blocks = sorted(block for stack in now for block in stack)
        if not blocks or blocks != sorted(block for stack in goal for block in stack) or len({*blocks}) < len(blocks):
            raise BadPuzzle("Blocksworld: expected lines 'now: A B | C' and 'goal: C B A' with the same blocks")
        return Table(now=now, goal=goal, shortest=len(_plan(now, goal)))

    def show(self, state: Table) -> str:
        """Both stackings, a line each."""
        return f"now: {show_stacks(state.now)}\ngoal: {show_stacks(state.goal)}"

    def board(self, state: Table) -> list[list[str]]:
        """The stacks as they are, side by side, on a line of # for the table."""
        stacks = sorted(state.now)
        layers = list(zip_longest(*stacks, fillvalue="."))
        return [*(list(layer) for layer in reversed(layers)), ["#"] * len(stacks)]

    def play(self, state: Table, actions: str) -> Played[Table] | None:
        """Move blocks; moves after the goal is reached are not made."""
        moves = [action.split() for action in items(actions)]
        if not moves or any(len(move) != 2 for move in moves):
            return None
        played = one_by_one(self, state, moves, _move)
        return replace(played, reward=self.solved_reward if self.solved(played.state) else 0.0)

    def solved(self, state: Table) -> bool:
        """Whether the stacks are the goal's."""
        return state.now == state.goal

    def spent(self, state: Table) -> bool:
        """Never: every stacking can be reached from every other."""
        return False

    def measure(self, state: Table) -> Mapping[str, float]:
        """`progress`: share of the blocks that stand, down to the table, on what they shall; `optimal`: no detour."""
        targets = {stack[: i + 1] for stack in state.goal for i in range(len(stack))}
        standing = [stack[: i + 1] for stack in state.now for i in range(len(stack))]
        optimal = self.solved(state) and state.moves == state.shortest
        return {"progress": sum(part in targets for part in standing) / len(standing), "optimal": float(optimal)}

    def solve(self, state: Table) -> str | None:
        """The fewest moves."""
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
    moves = breadth_first(now, _moves, lambda stacks: stacks == goal)
    assert moves is not None, "every stacking can be reached from every other"
    return tuple(moves)


def _move(state: Table, move: Sequence[str]) -> Played[Table]:
    after = dict(_moves(state.now)).get(" ".join(move))
    moved = replace(state, now=after or state.now, moves=state.moves + 1)
    return Played(state=moved, reward=0.0, impossible=after is None)


def _moves(stacks: Stacks) -> list[tuple[str, Stacks]]:
    """(move, stacks after it) of every possible move."""
    found = []
    for stack in sorted(stacks):
        rest, top = stack[:-1], stack[-1]
        without = stacks - {stack} | ({rest} if rest else set())
        found += [(f"{top} {other[-1]}", without - {other} | {(*other, top)}) for other in sorted(stacks - {stack})]
        if rest:
            found.append((f"{top} {TABLE}", without | {(top,)}))
    return found
