"""Games of text worlds as tasks: seeds of Gymnasium environments, games of ALFWorld, errands of WebShop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from rollout.base.seeds import derive_seed
from rollout.records.trajectory import RecordError, Task
from rollout.tasks.splits import check_splits, split_of

_T = TypeVar("_T")

_ALFWORLD = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}  # folders of its splits
_UNPLAYED = ("movable", "Sliced")  # in paths of games that ALFWorld's own loader passes over
_WEBSHOP = {"test": range(500), "validation": range(500, 1500), "train": range(1500, 12_087)}  # goals, as published
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
    check_splits(name, sizes)
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "gymnasium", name, split))
        keys: dict[str, None] = {}
        while len(keys) < size:
            key = str(random.randrange(2**31))
            if split_of(f"{name} {key}") == split:
                keys[key] = None
        tasks += [_task(name, key, key, split, instructions, "gymnasium") for key in keys]
    return tasks


def alfworld_tasks(seed: int, sizes: Mapping[str, int], *, folder: str) -> list[Task]:
    """sizes[split] games of `folder`, ALFWorld's json_2.1.1: of train, of valid_seen, and of valid_unseen for test.

    Raises:
        RecordError: the folder lacks one of these.
        ValueError: there are fewer games than asked for.
    """
    check_splits("alfworld", sizes)
    tasks = []
    for split, size in sizes.items():
        root = Path(folder) / _ALFWORLD[split]
        if size and not root.is_dir():
            raise RecordError(f"{root}: no such folder; expected ALFWorld's json_2.1.1, see `alfworld-download`")
        games = sorted(path for path in root.rglob("game.tw-pddl") if not any(word in str(path) for word in _UNPLAYED))
        for path in _drawn(seed, "alfworld", split, games, size):
            name = str(path.parent.relative_to(folder))
            tasks.append(_task("alfworld", name, str(path.resolve()), split, _HOUSEHOLD, "alfworld"))
    return tasks


def webshop_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """sizes[split] errands by number: goals 0 to 499 for test, 500 to 1499 for validation, the others for train.

    Raises:
        ValueError: there are fewer errands than asked for.
    """
    check_splits("webshop", sizes)
    return [
        _task("webshop", str(goal), str(goal), split, _SHOP, "webshop")
        for split, size in sizes.items()
        for goal in _drawn(seed, "webshop", split, _WEBSHOP[split], size)
    ]


def _drawn(seed: int, world: str, split: str, games: Sequence[_T], size: int) -> list[_T]:
    if size > len(games):
        raise ValueError(f"{world}: {size} {split} tasks asked for, but there are {len(games)}; lower data.{split}")
    return Random(derive_seed(seed, world, split)).sample(games, size)


def _task(source: str, name: str, key: str, split: str, prompt: str, env: str) -> Task:
    return Task(id=f"{source}/{name}", prompt=prompt, answers=(key,), env=env, source=source, split=split)
