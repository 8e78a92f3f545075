"""Puzzles drawn from a generator as tasks, without replacement, in splits that share nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random

from rollout.base.seeds import derive_seed
from rollout.environments.games import GAMES
from rollout.environments.games.generator import SPLITS, Source, split_of
from rollout.records.trajectory import Task

_PATIENCE = 20_000  # draws in a row without a new puzzle before a source counts as exhausted


def draw_tasks(source: Source, seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split; a key belongs to one split for every seed.

    Raises:
        ValueError: an unknown split, or there are fewer puzzles than asked for.
    """
    unknown = sorted(set(sizes) - set(SPLITS))
    if unknown:
        raise ValueError(f"{source.name}: unknown split {', '.join(unknown)}; splits: {', '.join(SPLITS)}")
    listed = source.everything()
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, source.name, split))
        puzzles = _draw(source, split, size, random) if listed is None else _sample(source, listed, split, size, random)
        tasks += [as_task(source, puzzle, split) for puzzle in puzzles]
    return tasks


def as_task(source: Source, puzzle: str, split: str) -> Task:
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


def _sample(source: Source, listed: Sequence[tuple[str, str]], split: str, size: int, random: Random) -> list[str]:
    own = [puzzle for key, puzzle in listed if split_of(key) == split]
    if size > len(own):
        raise ValueError(
            f"{source.name}: {size} {split} tasks asked for, but of its {len(listed)} puzzles {len(own)} belong to "
            f"{split}; lower data.{split}"
        )
    return random.sample(own, size)


def _draw(source: Source, split: str, size: int, random: Random) -> list[str]:
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
