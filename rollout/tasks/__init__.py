"""Task sets: what a team is asked, split into train, validation and test.

arithmetic.py    generated sums and word problems with exact answers; columns.py writes their solutions, right and wrong
encyclopedia.py  generated people and towns, passages about them, and questions of one and two hops
tabular.py       generated tables to predict; dsbench.py reads DSBench's own
repositories.py  generated packages with one bug (of repository_functions.py); swe_bench.py reads SWE-bench's rows
worlds.py        games of text worlds: Gymnasium, ALFWorld, WebShop
games/           generated puzzles: grids, Sokoban rooms, Sudokus, queens, blocks
files/           published data files: math, questions over passages, programs (programs.py reads their tests)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollout.environments.games import SOURCES
from rollout.environments.games.draw import draw_tasks
from rollout.environments.games.generator import Source
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks import arithmetic, dsbench, encyclopedia, repositories, tabular, worlds
from rollout.tasks.game_teacher import CARELESS, demonstrate
from rollout.teams.team import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A world of tasks that is a function of a seed."""

    tasks: Callable[..., list[Task]]  # (seed, tasks per split, **options)
    demonstrations: Callable[..., Iterator[Demonstration]]  # (seed, n, *, roles, **options), on training tasks only
    options: tuple[str, ...] = ()  # names of keyword arguments that say which tasks, taken by both
    passages: Callable[[int], list[encyclopedia.Entry]] | None = None  # (seed), where the tasks are about passages


def game_generator(source: type[Source]) -> Generator:
    """The world of one game's puzzles."""

    def tasks(seed: int, sizes: Mapping[str, int], **options: Any) -> list[Task]:
        return draw_tasks(source(**options), seed, sizes)

    def demonstrations(
        seed: int,
        n: int,
        *,
        roles: Mapping[str, Role],
        slips: Mapping[str, float] = CARELESS,
        max_turns: int = 2,
        **options: Any,
    ) -> Iterator[Demonstration]:
        return demonstrate(source(**options), seed, n, roles=roles, slips=slips, max_turns=max_turns)

    return Generator(tasks=tasks, demonstrations=demonstrations, options=tuple(field.name for field in fields(source)))


def no_demonstrations(seed: int, n: int, **_: Any) -> Iterator[Demonstration]:
    """Refuse: nobody has written down how a team should reply here.

    Raises:
        ValueError: always.
    """
    raise ValueError("these tasks have no demonstrations; name models that exist and set cold_start=null")


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(tasks=arithmetic.generate, demonstrations=arithmetic.demonstrations),
    "encyclopedia": Generator(
        tasks=encyclopedia.generate, demonstrations=encyclopedia.demonstrations, passages=encyclopedia.passages
    ),
    "tabular": Generator(
        tasks=tabular.generate,
        demonstrations=no_demonstrations,
        options=("kinds", "features", "train_rows", "test_rows"),
    ),
    "dsbench": Generator(tasks=dsbench.generate, demonstrations=no_demonstrations, options=("folder", "metrics")),
    "repositories": Generator(tasks=repositories.generate, demonstrations=no_demonstrations, options=("modules",)),
    "gymnasium": Generator(tasks=worlds.gymnasium, demonstrations=no_demonstrations, options=("name", "instructions")),
    "alfworld": Generator(tasks=worlds.alfworld, demonstrations=no_demonstrations, options=("folder",)),
    "webshop": Generator(tasks=worlds.webshop, demonstrations=no_demonstrations),
    **{game: game_generator(source) for game, source in SOURCES.items()},
}
