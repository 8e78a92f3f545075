"""Registry of task generators; tasks depend only on a seed and the generator's options."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from retrieval.client import Passage
from rollout.base.options import options_model
from rollout.base.signatures import check_call
from rollout.environments.games import PUZZLES, ZERO_SUM_GAMES
from rollout.environments.games.game import PuzzleSource
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks.arithmetic import arithmetic_tasks
from rollout.tasks.arithmetic_demonstrations import arithmetic_demonstrations
from rollout.tasks.deals import deal_demonstrations, deal_tasks
from rollout.tasks.encyclopedia import (
    encyclopedia_demonstrations,
    encyclopedia_tasks,
    memory_demonstrations,
)
from rollout.tasks.encyclopedia_world import passages
from rollout.tasks.formula_programs import program_demonstrations, program_tasks
from rollout.tasks.puzzles import draw_puzzle_tasks, puzzle_demonstrations
from rollout.tasks.repositories import repository_tasks
from rollout.tasks.tabular import dsbench_tasks, tabular_tasks
from rollout.tasks.verifiers import verifiers_tasks
from rollout.tasks.worlds import (
    alfworld_tasks,
    gymnasium_tasks,
    openenv_tasks,
    webshop_tasks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Generator of tasks.

    Attributes:
        tasks: called with (seed, number of tasks by split, *, options); raises ValueError if there
            are fewer tasks.
        demonstrations: called with (seed, n, *, roles or agents, options of the tasks, own
            options); shows training tasks only. None: the generator has none.
        options: callable whose keyword arguments are the options of the tasks; None: `tasks`.
        passages: called with (seed,), if the tasks are about passages.
    """

    tasks: Callable[..., list[Task]]
    demonstrations: Callable[..., Iterator[Demonstration]] | None = None
    options: Callable[..., object] | None = None
    passages: Callable[[int], list[Passage]] | None = None

    def __post_init__(self) -> None:
        check_call("tasks of a Generator", self.tasks, ("seed", "sizes"), generator=True)
        if self.demonstrations is not None:
            check_call(
                "demonstrations of a Generator", self.demonstrations, ("seed", "n"), generator=True
            )

    @property
    def task_options(self) -> type[BaseModel]:
        """Model of the options of the tasks."""
        return options_model(self.options or self.tasks)

    @property
    def demonstration_options(self) -> type[BaseModel] | None:
        """Model of the options that only demonstrations have; None without demonstrations."""
        if self.demonstrations is None:
            return None
        other_arguments = frozenset({"roles", "agents", *self.task_options.model_fields})
        return options_model(self.demonstrations, other_arguments)


def puzzle_generator(source: type[PuzzleSource]) -> Generator:
    """Return the generator of one game's puzzles."""

    def tasks(seed: int, sizes: Mapping[str, int], **options: Any) -> list[Task]:
        return draw_puzzle_tasks(source(**options), seed, sizes)

    demonstrations = partial(puzzle_demonstrations, source)
    # The reference page reads the descriptions of the options from the docstring.
    demonstrations.__doc__ = puzzle_demonstrations.__doc__
    return Generator(tasks=tasks, demonstrations=demonstrations, options=source)


def deal_generator(game: str) -> Generator:
    """Return the generator of the deals of a zero-sum game."""
    demonstrations = partial(deal_demonstrations, game)
    demonstrations.__doc__ = deal_demonstrations.__doc__
    return Generator(tasks=partial(deal_tasks, game), demonstrations=demonstrations)


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(tasks=arithmetic_tasks, demonstrations=arithmetic_demonstrations),
    "encyclopedia": Generator(
        tasks=encyclopedia_tasks, demonstrations=encyclopedia_demonstrations, passages=passages
    ),
    "encyclopedia_chats": Generator(
        tasks=encyclopedia_tasks, demonstrations=memory_demonstrations, passages=passages
    ),
    "programs": Generator(tasks=program_tasks, demonstrations=program_demonstrations),
    "tabular": Generator(tasks=tabular_tasks),
    "dsbench": Generator(tasks=dsbench_tasks),
    "repositories": Generator(tasks=repository_tasks),
    "gymnasium": Generator(tasks=gymnasium_tasks),
    "alfworld": Generator(tasks=alfworld_tasks),
    "webshop": Generator(tasks=webshop_tasks),
    "openenv": Generator(tasks=openenv_tasks),
    "verifiers": Generator(tasks=verifiers_tasks),
    **{game: puzzle_generator(source) for game, source in PUZZLES.items()},
    **{game: deal_generator(game) for game in ZERO_SUM_GAMES},
}
