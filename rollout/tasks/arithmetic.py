"""Generated sums and word problems in graded difficulty, for a demo that a tiny model learns on a CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from rollout.agent import ROLES, Role
from rollout.orchestras.solver_verifier import slots
from rollout.records import Demonstration, Message, Task
from rollout.seeds import derive_seed
from rollout.tasks.columns import review, work_out, work_out_wrongly

SPLITS = ("train", "validation", "test")
_FIRST, _VERDICTS = 0.75, 0.15  # shares of demonstrations; the rest are second attempts
_PATIENCE = 1000  # draws in a row without a new problem before a source counts as exhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data source: numbers of a size, put in one of several wordings."""

    digits: int
    wordings: Mapping[str, tuple[str, ...]]  # by operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One drawn problem."""

    source: str
    operation: str
    numbers: tuple[int, ...]
    text: str

    @property
    def answer(self) -> int:
        """The exact answer."""
        return sum(self.numbers) if self.operation == "+" else self.numbers[0] - sum(self.numbers[1:])

    @property
    def split(self) -> str:
        """The split that owns these numbers, in any order and wording: 80 % train, 10 % validation, 10 % test."""
        key = f"{self.operation}{sorted(self.numbers)}"
        bucket = hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 10
        return ("validation", "test")[bucket] if bucket < 2 else "train"


_PLAIN = {"+": ("What is {sum}?",), "-": ("What is {sum}?",)}
_STORIES = {
    "+": (
        "{name} has {0} {things} and buys {1} more. How many now?",
        "{name} sold {0} {things} in May and {1} in June. How many in all?",
        "{name} packs {0} {things}, then {1} more. How many in all?",
    ),
    "-": (
        "{name} has {0} {things} and sells {1}. How many are left?",
        "{name} had {0} {things} and lost {1}. How many are left?",
        "{name} needs {0} {things} and has {1}. How many are missing?",
    ),
}
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
_THINGS = ("coins", "cups", "books", "pens", "nuts", "stamps")

SOURCES: dict[str, Source] = {  # in order of difficulty
    "add_2digit": Source(digits=2, wordings={"+": _PLAIN["+"]}),
    "sub_2digit": Source(digits=2, wordings={"-": _PLAIN["-"]}),
    "word_2digit": Source(digits=2, wordings=_STORIES),
    "add_3digit": Source(digits=3, wordings={"+": _PLAIN["+"]}),
    "sub_3digit": Source(digits=3, wordings={"-": _PLAIN["-"]}),
    "word_3digit": Source(digits=3, wordings=_STORIES),
}


def generate(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split, shared out evenly over the sources.

    No sum, in whatever order or wording, is in two splits. A task's id says what it is and depends on nothing else.

    Raises:
        ValueError: an unknown split, or a source has too few different problems.
    """
    unknown = sorted(set(sizes) - set(SPLITS))
    if unknown:
        raise ValueError(f"arithmetic: unknown split {', '.join(unknown)}; splits: {', '.join(SPLITS)}")
    tasks = []
    for split, size in sizes.items():
        for rank, source in enumerate(SOURCES):
            share = size // len(SOURCES) + (rank < size % len(SOURCES))
            tasks += _draw_tasks(Random(derive_seed(seed, "arithmetic", split, source)), source, split, share)
    return tasks


def demonstrations(
    seed: int, n: int, *, roles: Mapping[str, Role] = ROLES, slips: float = 0.0
) -> Iterator[Demonstration]:
    """Yield `n` demonstrations of solver and verifier on training problems, in the words of `roles`.

    Most are first attempts; verdicts, half of them on wrong solutions, and second attempts after a rejection, most
    often a just one, need fewer. Every conversation up to the reply is exactly what the orchestra `solver_verifier`
    would show to the role.
    """
    for index in range(n):
        random = Random(derive_seed(seed, "arithmetic demonstration", index))
        problem = _draw(random, random.choice(tuple(SOURCES)), "train")
        right = work_out(problem.operation, problem.numbers)
        wrong, slip = work_out_wrongly(random, problem.operation, problem.numbers)
        careless = random.random() < slips
        attempt = work_out_wrongly(random, problem.operation, problem.numbers, ("carry",))[0] if careless else right
        kind = random.random()
        if kind < _FIRST:
            yield _demonstrate(roles, problem, [], "solver", attempt)
        elif kind < _FIRST + _VERDICTS:
            solution, found = random.choice(((right, None), (wrong, slip)))
            yield _demonstrate(roles, problem, [("solver", solution)], "verifier", review(problem.numbers, found))
        else:
            first = wrong if random.random() < 0.8 else right
            said = [("solver", first), ("verifier", review(problem.numbers, slip))]
            yield _demonstrate(roles, problem, said, "solver", attempt)


def _demonstrate(
    roles: Mapping[str, Role], problem: Problem, said: list[tuple[str, str]], agent: str, reply: str
) -> Demonstration:
    messages = roles[agent].messages(**slots(problem.text, said))
    return Demonstration(agent=agent, messages=(*messages, Message(role="assistant", content=reply)))


def _draw_tasks(random: Random, source: str, split: str, count: int) -> list[Task]:
    tasks: dict[str, Task] = {}
    misses = 0
    while len(tasks) < count:
        problem = _draw(random, source, split)
        identity = f"{source}:{problem.operation.join(map(str, problem.numbers))}"
        misses = misses + 1 if identity in tasks else 0
        if misses > _PATIENCE:
            raise ValueError(
                f"arithmetic: {count} {split} tasks of {source} asked for, but there are only about {len(tasks)} "
                f"different ones; lower the size of {split}"
            )
        tasks.setdefault(
            identity,
            Task(
                id=identity,
                prompt=problem.text,
                answers=(str(problem.answer),),
                env="math",
                source=source,
                split=split,
            ),
        )
    return list(tasks.values())


def _draw(random: Random, name: str, split: str) -> Problem:
    source = SOURCES[name]
    while True:
        operation = random.choice(tuple(source.wordings))
        low, high = 10 ** (source.digits - 1), 10**source.digits - 1
        numbers = [random.randint(low, high) for _ in range(2)]
        if operation == "-":
            numbers.sort(reverse=True)
        wording = random.choice(source.wordings[operation])
        text = wording.format(
            *numbers,
            sum=operation.join(map(str, numbers)),
            name=random.choice(_NAMES),
            things=random.choice(_THINGS),
        )
        problem = Problem(source=name, operation=operation, numbers=tuple(numbers), text=text)
        if problem.split == split:
            return problem
