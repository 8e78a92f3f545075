"""Arithmetic tasks, generated: sums and word problems in graded difficulty."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rollout.base.yaml_files import read_yaml
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.splits import draw_different, split_of

_TEXTS: Mapping[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))

# Data sources in order of difficulty: `digits` of the numbers, and `wordings` by operation.
LEVELS: Mapping[str, Mapping[str, Any]] = _TEXTS["levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Sum or difference of numbers.

    Attributes:
        operation: "+", or "-" to subtract all other numbers from the first one.
        numbers: numbers to add or subtract.
        text: text of the problem.
    """

    operation: str
    numbers: tuple[int, ...]
    text: str

    @property
    def answer(self) -> int:
        """The exact answer."""
        if self.operation == "+":
            return sum(self.numbers)
        return self.numbers[0] - sum(self.numbers[1:])

    @property
    def split(self) -> str:
        """Split that these numbers belong to, in any order and wording."""
        return split_of(f"{self.operation}{sorted(self.numbers)}")


def arithmetic_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split, in equal numbers from each data source.

    No sum is in two splits, whatever its order or wording. The id of a task names its numbers, and
    does not depend on the seed.
    """
    tasks = []
    for split, size in sizes.items():
        for rank, source in enumerate(LEVELS):
            has_one_more = rank < size % len(LEVELS)
            count = size // len(LEVELS) + has_one_more
            random = Random(derive_seed(seed, "arithmetic", split, source))
            tasks += _draw_tasks(random, source, split, count)
    return tasks


def _draw_tasks(random: Random, source: str, split: str, count: int) -> list[Task]:
    def draw() -> Task:
        problem = draw_sum(random, source, split)
        return Task(
            id=f"{source}:{problem.operation.join(map(str, problem.numbers))}",
            prompt=problem.text,
            answers=(str(problem.answer),),
            env="math",
            source=source,
            split=split,
        )

    return draw_different(source, split, count, draw, key=lambda task: task.id)


def draw_sum(random: Random, source: str, split: str) -> Sum:
    """Draw a problem of a data source that belongs to a split."""
    digits = LEVELS[source]["digits"]
    wordings = LEVELS[source]["wordings"]
    smallest = 10 ** (digits - 1)
    largest = 10**digits - 1
    while True:
        operation = random.choice(tuple(wordings))
        numbers = [random.randint(smallest, largest) for _ in range(2)]
        if operation == "-":
            numbers.sort(reverse=True)
        wording = random.choice(wordings[operation])
        name = random.choice(_TEXTS["names"])
        things = random.choice(_TEXTS["things"])
        text = wording.format(
            *numbers, sum=operation.join(map(str, numbers)), name=name, things=things
        )
        problem = Sum(operation=operation, numbers=tuple(numbers), text=text)
        if problem.split == split:
            return problem
