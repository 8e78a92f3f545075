"""Task sets: what a team is asked, split into train, validation and test.

arithmetic.py    generated sums and word problems with exact answers; columns.py writes their solutions, right and wrong
encyclopedia.py  generated people and towns, passages about them, and questions of one and two hops
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rollout.records import Demonstration, Task
from rollout.tasks import arithmetic, encyclopedia


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A world of tasks that is a function of a seed."""

    tasks: Callable[[int, Mapping[str, int]], list[Task]]  # (seed, tasks per split)
    demonstrations: Callable[..., Iterator[Demonstration]]  # (seed, n, *, roles, **options), on training tasks only
    passages: Callable[[int], list[encyclopedia.Entry]] | None = None  # (seed), where the tasks are about passages


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(tasks=arithmetic.generate, demonstrations=arithmetic.demonstrations),
    "encyclopedia": Generator(
        tasks=encyclopedia.generate, demonstrations=encyclopedia.demonstrations, passages=encyclopedia.passages
    ),
}
