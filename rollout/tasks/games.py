"""Puzzles (games) as tasks, drawn without replacement, and demonstrations by a teacher that slips."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from pydantic import PositiveInt

from rollout.base.options import Share
from rollout.base.seeds import derive_seed
from rollout.environments.games import GAMES
from rollout.environments.games.game import GameEnv, PuzzleSource
from rollout.orchestras.game_team import game_team
from rollout.orchestras.parsers import DECIDED, LISTED
from rollout.orchestras.single import single
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks.splits import check_splits, split_of
from rollout.teams.team import AgentReply, Role, Team, TeamSession

_PATIENCE = 20_000  # draws in a row without a new puzzle before a source counts as exhausted
CARELESS: Mapping[str, float] = {"tool": 0.5, "planner": 0.5, "player": 0.5}


def draw_tasks(source: PuzzleSource, seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split; a key belongs to one split for every seed.

    Raises:
        ValueError: an unknown split, or there are fewer puzzles than asked for.
    """
    check_splits(source.name, sizes)
    listed = source.everything()
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, source.name, split))
        puzzles = _draw(source, split, size, random) if listed is None else _sample(source, listed, split, size, random)
        tasks += [as_task(source, puzzle, split) for puzzle in puzzles]
    return tasks


def as_task(source: PuzzleSource, puzzle: str, split: str) -> Task:
    """A puzzle as a task: its id is a hash of its text, its answer a solution."""
    game = GAMES[source.game]()
    solution = game.solve(game.read(puzzle))
    assert solution is not None, f"{source.name} drew a puzzle without a solution:\n{puzzle}"
    return Task(
        id=f"{source.name}/{hashlib.blake2b(puzzle.encode(), digest_size=8).hexdigest()}",
        prompt=puzzle,
        answers=(solution,),
        env=source.game,
        source=source.name,
        split=split,
    )


def _sample(
    source: PuzzleSource, listed: Sequence[tuple[str, str]], split: str, size: int, random: Random
) -> list[str]:
    own = [puzzle for key, puzzle in listed if split_of(key) == split]
    if size > len(own):
        raise ValueError(
            f"{source.name}: {size} {split} tasks asked for, but of its {len(listed)} puzzles {len(own)} belong to "
            f"{split}; lower data.{split}"
        )
    return random.sample(own, size)


def _draw(source: PuzzleSource, split: str, size: int, random: Random) -> list[str]:
    found: dict[str, None] = {}
    misses = 0
    while len(found) < size:
        puzzle = source.draw(random, lambda key: split_of(key) == split)
        new = puzzle is not None and puzzle not in found
        misses = 0 if new else misses + 1
        if misses > _PATIENCE:
            raise ValueError(
                f"{source.name}: {size} {split} tasks asked for, but {_PATIENCE} draws after the {len(found)}th found "
                f"no other, so there are hardly more; lower data.{split} or ask for larger puzzles"
            )
        if puzzle is not None:
            found[puzzle] = None
    return list(found)


def demonstrate(
    source: PuzzleSource,
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    slips: Mapping[str, Share] = CARELESS,
    max_turns: PositiveInt = 2,
) -> Iterator[Demonstration]:
    """`n` turns on training puzzles of `source`, in the order they were spoken.

    Roles `tool` and `planner` play the orchestra `game_team`, a role `player` plays `single`. Each agent slips with
    probability `slips[agent]` a turn: the tool agent and the player make one mistake in a right list of actions, the
    planner passes a proposal on unread. A policy that imitates them perfectly is legal but far from right: by default
    half of the proposals are wrong, and half of those are taken.

    Args:
        seed: of the puzzles and of the slips.
        n: number of demonstrations.
        roles: the roles as the rollout will use them, by agent name.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        max_turns: as at rollout.
    """
    orchestra = game_team if "planner" in roles else single
    spoken = 0
    for episode in count():
        random = Random(derive_seed(seed, source.name, "demonstration", episode))
        puzzle = source.draw(random, lambda key: split_of(key) == "train")
        if puzzle is None:
            continue
        task = as_task(source, puzzle, "train")
        teacher = _Teacher(source, task, roles, slips, random)
        asyncio.run(orchestra(task, teacher, GameEnv(GAMES[source.game](), max_turns=max_turns), max_turns=max_turns))
        for demonstration in teacher.demonstrations:
            if spoken == n:
                return
            yield demonstration
            spoken += 1


class _Teacher(TeamSession):
    """A team that knows a solution from wherever it stands, slips, and writes down what it said."""

    def __init__(
        self, source: PuzzleSource, task: Task, roles: Mapping[str, Role], slips: Mapping[str, float], random: Random
    ) -> None:
        super().__init__(Team({}, {}), ())
        self._source = source
        self._game: Any = GAMES[source.game]()
        self._state = self._game.read(task.prompt)
        self._roles = roles
        self._slips = slips
        self._random = random
        self.demonstrations: list[Demonstration] = []

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        role = self._roles[name]
        actions = self._actions(name, str(slots.get("proposal", "")))
        text = f"{LISTED if name == 'tool' else DECIDED} {actions}"
        reply = Message(role="assistant", content=text)
        self.demonstrations.append(Demonstration(agent=name, messages=(*role.messages(**slots), reply)))
        if name != "tool":
            self._state = self._game.play(self._state, actions).state
        return AgentReply(text=text, value=role.parse(text), turn=len(self.demonstrations) - 1)

    def score(self, index: int, /, **scores: float) -> None:
        """Demonstrations are not scored."""

    def _actions(self, name: str, proposal: str) -> str:
        right = self._game.solve(self._state)
        if right is None:  # a room that a slip has lost
            return proposal or self._random.choice("UDLR")
        if self._random.random() >= self._slips.get(name, 0.0):
            return str(right)
        return proposal or self._source.slip(self._random, right)
