"""Text worlds as tasks: Gymnasium environments, ALFWorld, WebShop and OpenEnv."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

from pydantic import JsonValue

from rollout.records.files import RecordError
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.splits import draw_different, draw_listed, split_of

_T = TypeVar("_T")

# ALFWorld's folders by split.
_ALFWORLD_FOLDERS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}

# Parts of paths of games that ALFWorld's own loader leaves out.
_UNPLAYED_GAMES = ("movable", "Sliced")

# WebShop's goals by split, as published.
_WEBSHOP_GOALS = {
    "test": range(500),
    "validation": range(500, 1500),
    "train": range(1500, 12_087),
}

_ALFWORLD_PROMPT = "You are in a house. Do what the task says, one action at a time."
_WEBSHOP_PROMPT = (
    "You are in a web shop. Find the product that is asked for, choose its options and buy it."
)


def gymnasium_tasks(
    seed: int, sizes: Mapping[str, int], *, name: str = "gymnasium", instructions: str = ""
) -> list[Task]:
    """Draw sizes[split] games for each split.

    A game is identified by the seed of its reset, which belongs to the same split whatever the seed of
    the run is.

    Args:
        seed: seed of the run.
        sizes: number of tasks by split.
        name: data source to report under.
        instructions: text that agents get before the first scene.
    """
    return _seeded_games("gymnasium", seed, sizes, name, instructions, str)


def openenv_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    name: str = "openenv",
    instructions: str = "",
    reset: Mapping[str, JsonValue] | None = None,
) -> list[Task]:
    """Draw sizes[split] games of an environment of OpenEnv for each split.

    A game is identified by the seed of its reset, which belongs to the same split whatever the seed of
    the run is.

    Args:
        seed: seed of the run.
        sizes: number of tasks by split.
        name: data source to report under.
        instructions: text that agents get before the first observation.
        reset: further arguments of every reset.
    """

    def key_of(number: int) -> str:
        return json.dumps({**(reset or {}), "seed": number})

    return _seeded_games("openenv", seed, sizes, name, instructions, key_of)


def _seeded_games(
    env: str,
    seed: int,
    sizes: Mapping[str, int],
    name: str,
    instructions: str,
    key_of: Callable[[int], str],
) -> list[Task]:
    """Draw games that are seeds of a reset.

    `key_of` returns the game's key for a seed, the only entry of the task's `answers`.
    """

    def draw(random: Random, split: str) -> int | None:
        number = random.randrange(2**31)
        return number if split_of(f"{name} {number}") == split else None

    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, env, name, split))
        for number in draw_different(name, split, size, partial(draw, random, split)):
            tasks.append(
                Task(
                    id=f"{name}/{number}",
                    prompt=instructions,
                    answers=(key_of(number),),
                    env=env,
                    source=name,
                    split=split,
                )
            )
    return tasks


def alfworld_tasks(seed: int, sizes: Mapping[str, int], *, folder: str) -> list[Task]:
    """Draw sizes[split] games of ALFWorld for each split.

    The splits are ALFWorld's train, valid_seen for validation, and valid_unseen for test. Games that
    ALFWorld's own loader leaves out ("movable" or "Sliced" in the path) are left out here too.

    Args:
        seed: seed of the run.
        sizes: number of tasks by split.
        folder: ALFWorld's `json_2.1.1`.

    Raises:
        RecordError: the folder of a split is missing.
        ValueError: a split has fewer games than are asked for.
    """
    tasks = []
    for split, size in sizes.items():
        split_folder = Path(folder) / _ALFWORLD_FOLDERS[split]
        if size and not split_folder.is_dir():
            raise RecordError(
                f"{split_folder}: no such folder; expected ALFWorld's json_2.1.1, see "
                "`alfworld-download`"
            )
        games = sorted(
            path
            for path in split_folder.rglob("game.tw-pddl")
            if not any(part in str(path) for part in _UNPLAYED_GAMES)
        )
        for path in _draw_games(seed, "alfworld", split, games, size):
            tasks.append(
                Task(
                    id=f"alfworld/{path.parent.relative_to(folder)}",
                    prompt=_ALFWORLD_PROMPT,
                    answers=(str(path.resolve()),),
                    env="alfworld",
                    source="alfworld",
                    split=split,
                )
            )
    return tasks


def webshop_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] goals of WebShop for each split.

    Goals 0 to 499 are for test, 500 to 1499 for validation, and the others for train.

    Raises:
        ValueError: a split has fewer goals than are asked for.
    """
    tasks = []
    for split, size in sizes.items():
        for goal in _draw_games(seed, "webshop", split, _WEBSHOP_GOALS[split], size):
            tasks.append(
                Task(
                    id=f"webshop/{goal}",
                    prompt=_WEBSHOP_PROMPT,
                    answers=(str(goal),),
                    env="webshop",
                    source="webshop",
                    split=split,
                )
            )
    return tasks


def _draw_games(seed: int, world: str, split: str, games: Sequence[_T], size: int) -> list[_T]:
    random = Random(derive_seed(seed, world, split))
    return draw_listed(world, split, size, games, random)
