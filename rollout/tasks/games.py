"""Puzzles (games) and text worlds as tasks, drawn without replacement; a teacher that slips plays the puzzles."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.environments import ENVS
from rollout.environments.games import GAMES
from rollout.environments.games.game import Owns, PuzzleSource
from rollout.orchestras.acting import game_team, single
from rollout.orchestras.replies import DECIDED, LISTED
from rollout.records.files import RecordError
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks.chats import TeachingSession
from rollout.tasks.splits import digest, draw_different, draw_listed, split_of
from rollout.teams.roles import Role

CARELESS: Mapping[str, float] = {"tool": 0.5, "planner": 0.5, "player": 0.5}


def draw_tasks(source: PuzzleSource, seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split; a key belongs to one split for every seed."""
    listed = source.everything()
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, source.name, split))
        if listed is None:
            puzzles = draw_different(
                source.name, split, size, partial(source.draw, random, _owned_by(split))
            )
        else:
            owned = [puzzle for key, puzzle in listed if split_of(key) == split]
            puzzles = draw_listed(source.name, split, size, owned, random)
        tasks += [as_task(source, puzzle, split) for puzzle in puzzles]
    return tasks


def _owned_by(split: str) -> Owns:
    return lambda key: split_of(key) == split


def as_task(source: PuzzleSource, puzzle: str, split: str) -> Task:
    """A puzzle as a task: its id is a hash of its text, its answer a solution."""
    game = GAMES[source.game]()
    solution = game.solve(game.read(puzzle))
    assert solution is not None, f"{source.name} drew a puzzle without a solution:\n{puzzle}"
    id = f"{source.name}/{digest(puzzle)}"
    return Task(
        id=id, prompt=puzzle, answers=(solution,), env=source.game, source=source.name, split=split
    )


def demonstrate(
    puzzles: Callable[..., PuzzleSource],
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    slips: Mapping[str, Share] = CARELESS,
    max_turns: PositiveInt = 2,
    **options: Any,
) -> Iterator[Demonstration]:
    """`n` turns on training puzzles of the source that `puzzles` makes of `options`, in the order they were spoken.

    Roles `tool` and `planner` play the orchestra `game_team`, a role `player` plays `single`. Each agent slips with
    probability `slips[agent]` a turn: the tool agent and the player make one mistake in a right list of actions, the
    planner passes a proposal on unread. A policy that imitates them perfectly is legal but far from right: by default
    half of the proposals are wrong, and half of those are taken.

    Args:
        roles: the roles as the rollout will use them, by agent name.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        max_turns: as at rollout.
    """
    source, orchestra = puzzles(**options), game_team if "planner" in roles else single

    def spoken() -> Iterator[Demonstration]:
        for episode in count():
            random = Random(derive_seed(seed, source.name, "demonstration", episode))
            puzzle = source.draw(random, _owned_by("train"))
            if puzzle is not None:
                task = as_task(source, puzzle, "train")
                teacher = _Teacher(source, task, roles, slips, random)
                env: Any = ENVS[source.game](task, max_turns=max_turns)  # which can preview
                asyncio.run(orchestra(task, teacher, env, max_turns=max_turns))
                yield from teacher.demonstrations

    return islice(spoken(), n)


class _Teacher(TeachingSession):
    """A team that knows a solution from wherever it stands."""

    def __init__(
        self,
        source: PuzzleSource,
        task: Task,
        roles: Mapping[str, Role],
        slips: Mapping[str, float],
        random: Random,
    ) -> None:
        super().__init__(roles, slips, random)
        self._source = source
        self._game: Any = GAMES[source.game]()
        self._state = self._game.read(task.prompt)

    def said_by(self, agent: str, slots: Mapping[str, object]) -> str:
        proposal, right = str(slots.get("proposal", "")), self._game.solve(self._state)
        if right is None:  # a room that a slip has lost
            actions = proposal or self._random.choice("UDLR")
        else:
            actions = (
                (proposal or self._source.slip(self._random, right)) if self.slip(agent) else right
            )
        if agent == "tool":
            return f"{LISTED} {actions}"
        self._state = self._game.play(self._state, actions).state
        return f"{DECIDED} {actions}"


_T = TypeVar("_T")

_ALFWORLD = {
    "train": "train",
    "validation": "valid_seen",
    "test": "valid_unseen",
}  # folders of its splits
_UNPLAYED = ("movable", "Sliced")  # in paths of games that ALFWorld's own loader passes over
_WEBSHOP = {
    "test": range(500),
    "validation": range(500, 1500),
    "train": range(1500, 12_087),
}  # goals, as published
_HOUSEHOLD = "You are in a house. Do what the task says, one action at a time."
_SHOP = "You are in a web shop. Find the product that is asked for, choose its options and buy it."


def gymnasium_tasks(
    seed: int, sizes: Mapping[str, int], *, name: str = "gymnasium", instructions: str = ""
) -> list[Task]:
    """sizes[split] games, each the seed of a reset; a seed belongs to one split whatever the run's.

    Args:
        name: data source to report under.
        instructions: what agents are told before the first scene.
    """

    def draw(random: Random, split: str) -> str | None:
        key = str(random.randrange(2**31))
        return key if split_of(f"{name} {key}") == split else None

    draws = {
        split: partial(draw, Random(derive_seed(seed, "gymnasium", name, split)), split)
        for split in sizes
    }
    return [
        _world_task(name, key, key, split, instructions, "gymnasium")
        for split, size in sizes.items()
        for key in draw_different(name, split, size, draws[split])
    ]


def alfworld_tasks(seed: int, sizes: Mapping[str, int], *, folder: str) -> list[Task]:
    """sizes[split] games of `folder`, ALFWorld's json_2.1.1: of train, of valid_seen, and of valid_unseen for test.

    Args:
        folder: ALFWorld's `json_2.1.1`.

    Raises:
        RecordError: the folder lacks one of these.
    """
    tasks = []
    for split, size in sizes.items():
        root = Path(folder) / _ALFWORLD[split]
        if size and not root.is_dir():
            raise RecordError(
                f"{root}: no such folder; expected ALFWorld's json_2.1.1, see `alfworld-download`"
            )
        games = sorted(
            path
            for path in root.rglob("game.tw-pddl")
            if not any(word in str(path) for word in _UNPLAYED)
        )
        for path in _drawn(seed, "alfworld", split, games, size):
            name = str(path.parent.relative_to(folder))
            tasks.append(
                _world_task("alfworld", name, str(path.resolve()), split, _HOUSEHOLD, "alfworld")
            )
    return tasks


def webshop_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """sizes[split] errands by number: goals 0 to 499 for test, 500 to 1499 for validation, the others for train."""
    return [
        _world_task("webshop", str(goal), str(goal), split, _SHOP, "webshop")
        for split, size in sizes.items()
        for goal in _drawn(seed, "webshop", split, _WEBSHOP[split], size)
    ]


def _drawn(seed: int, world: str, split: str, games: Sequence[_T], size: int) -> list[_T]:
    return draw_listed(world, split, size, games, Random(derive_seed(seed, world, split)))


def _world_task(source: str, name: str, key: str, split: str, prompt: str, env: str) -> Task:
    return Task(
        id=f"{source}/{name}", prompt=prompt, answers=(key,), env=env, source=source, split=split
    )
