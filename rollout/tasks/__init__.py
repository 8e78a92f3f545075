"""Task sets (data): what a team is asked, split into train, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from retrieval.client import Passage
from rollout.base.options import options_model
from rollout.base.signatures import check_call
from rollout.environments.games import PUZZLES
from rollout.environments.games.game import PuzzleSource
from rollout.records.trajectory import Demonstration, Task
from rollout.tasks.arithmetic import arithmetic_demonstrations, arithmetic_tasks
from rollout.tasks.chats import program_demonstrations, program_tasks
from rollout.tasks.encyclopedia import (
    encyclopedia_demonstrations,
    encyclopedia_tasks,
    memory_demonstrations,
    passages,
)
from rollout.tasks.games import (
    alfworld_tasks,
    demonstrate,
    draw_tasks,
    gymnasium_tasks,
    webshop_tasks,
)
from rollout.tasks.repositories import repository_tasks
from rollout.tasks.tabular import dsbench_tasks, tabular_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A world of tasks that is a function of a seed."""

    tasks: Callable[
        ..., list[Task]
    ]  # (seed, tasks per split, *, options); ValueError: there are fewer
    # (seed, n, *, roles or agents, the options of the tasks, options of its own), on training tasks only; None: none
    demonstrations: Callable[..., Iterator[Demonstration]] | None = None
    options: Callable[..., object] | None = (
        None  # whose keyword arguments say which tasks; None: those of `tasks`
    )
    passages: Callable[[int], list[Passage]] | None = (
        None  # (seed), where the tasks are about passages
    )

    def __post_init__(self) -> None:
        check_call("tasks of a Generator", self.tasks, ("seed", "sizes"), generator=True)
        if self.demonstrations is not None:
            check_call(
                "demonstrations of a Generator", self.demonstrations, ("seed", "n"), generator=True
            )

    @property
    def task_options(self) -> type[BaseModel]:
        """What says which tasks."""
        return options_model(self.options or self.tasks)

    @property
    def demonstration_options(self) -> type[BaseModel] | None:
        """What says further how demonstrations are made of them; None where there are none."""
        if self.demonstrations is None:
            return None
        return options_model(
            self.demonstrations, frozenset({"roles", "agents", *self.task_options.model_fields})
        )


def game_generator(source: type[PuzzleSource]) -> Generator:
    """The world of one game's puzzles."""

    def tasks(seed: int, sizes: Mapping[str, int], **options: Any) -> list[Task]:
        return draw_tasks(source(**options), seed, sizes)

    demonstrations = partial(demonstrate, source)
    demonstrations.__doc__ = demonstrate.__doc__  # its `Args:` describe the options
    return Generator(tasks=tasks, demonstrations=demonstrations, options=source)


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
    **{game: game_generator(source) for game, source in PUZZLES.items()},
}
