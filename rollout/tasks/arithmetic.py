"""Arithmetic tasks, generated: sums and word problems in graded difficulty, for a demo that learns on a CPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rollout.base.section import Share
from rollout.base.yaml_files import read_yaml
from rollout.orchestras.sequential import slots
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks.splits import draw_different, split_of
from rollout.teams.roles import ROLES, Role

_FIRST, _VERDICTS = 0.75, 0.15  # shares of demonstrations; the rest are second attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """One drawn problem."""

    operation: str
    numbers: tuple[int, ...]
    text: str

    @property
    def answer(self) -> int:
        """The exact answer."""
        return (
            sum(self.numbers) if self.operation == "+" else self.numbers[0] - sum(self.numbers[1:])
        )

    @property
    def split(self) -> str:
        """The split that owns these numbers, in any order and wording."""
        return split_of(f"{self.operation}{sorted(self.numbers)}")


_WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))
# data sources, in order of difficulty: the `digits` of numbers, and by operation the `wordings` they are put in
LEVELS: Mapping[str, Mapping[str, Any]] = _WORDS["levels"]


def arithmetic_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different tasks for each split, shared out evenly over the sources.

    No sum, in whatever order or wording, is in two splits. A task's id says what it is and depends on nothing else.
    """
    tasks = []
    for split, size in sizes.items():
        for rank, source in enumerate(LEVELS):
            share = size // len(LEVELS) + (rank < size % len(LEVELS))
            tasks += _draw_tasks(
                Random(derive_seed(seed, "arithmetic", split, source)), source, split, share
            )
    return tasks


def arithmetic_demonstrations(
    seed: int, n: int, *, roles: Mapping[str, Role] = ROLES, slips: Share = 0.0
) -> Iterator[Demonstration]:
    """Yield `n` demonstrations of solver and verifier on training problems, in the words of `roles`.

    Most are first attempts; verdicts, half of them on wrong solutions, and second attempts after a rejection, most
    often a just one, need fewer. Every conversation up to the reply is exactly what the orchestra `solver_verifier`
    would show to the role.

    Args:
        slips: probability that the solver of a demonstration is careless and drops carries.
    """
    for index in range(n):
        random = Random(derive_seed(seed, "arithmetic demonstration", index))
        problem = _draw(random, random.choice(tuple(LEVELS)), "train")
        right = work_out(problem.operation, problem.numbers)
        wrong, slip = work_out_wrongly(random, problem.operation, problem.numbers)
        careless = random.random() < slips
        attempt = (
            work_out_wrongly(random, problem.operation, problem.numbers, ("carry",))[0]
            if careless
            else right
        )
        kind = random.random()
        if kind < _FIRST:
            yield _demonstrate(roles, problem, [], "solver", attempt)
        elif kind < _FIRST + _VERDICTS:
            solution, found = random.choice(((right, None), (wrong, slip)))
            yield _demonstrate(
                roles, problem, [("solver", solution)], "verifier", review(problem.numbers, found)
            )
        else:
            first = wrong if random.random() < 0.8 else right
            said = [("solver", first), ("verifier", review(problem.numbers, slip))]
            yield _demonstrate(roles, problem, said, "solver", attempt)


def _demonstrate(
    roles: Mapping[str, Role], problem: Sum, said: list[tuple[str, str]], agent: str, reply: str
) -> Demonstration:
    messages = roles[agent].messages(**slots(problem.text, said))
    return Demonstration(
        agent=agent, messages=(*messages, Message(role="assistant", content=reply))
    )


def _draw_tasks(random: Random, source: str, split: str, count: int) -> list[Task]:
    def draw() -> Task:
        problem = _draw(random, source, split)
        name = f"{source}:{problem.operation.join(map(str, problem.numbers))}"
        answers = (str(problem.answer),)
        return Task(
            id=name, prompt=problem.text, answers=answers, env="math", source=source, split=split
        )

    return draw_different(source, split, count, draw, key=lambda task: task.id)  # in whatever words


def _draw(random: Random, name: str, split: str) -> Sum:
    digits, wordings = LEVELS[name]["digits"], LEVELS[name]["wordings"]
    while True:
        operation = random.choice(tuple(wordings))
        low, high = 10 ** (digits - 1), 10**digits - 1
        numbers = [random.randint(low, high) for _ in range(2)]
        if operation == "-":
            numbers.sort(reverse=True)
        wording = random.choice(wordings[operation])
        who, what = random.choice(_WORDS["names"]), random.choice(_WORDS["things"])
        text = wording.format(
            *numbers, sum=operation.join(map(str, numbers)), name=who, things=what
        )
        problem = Sum(operation=operation, numbers=tuple(numbers), text=text)
        if problem.split == split:
            return problem


SLIPS = ("copy", "sum", "carry", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """One mistake in a written solution; what follows it is consistent with it."""

    kind: str  # copy: a digit read wrongly | sum: a column computed wrongly | carry: lost or invented | result
    column: int  # from the low digit, 0
    amount: int  # added to the digit (modulo 10) or to the column's result


def work_out(operation: str, numbers: Sequence[int], slip: Slip | None = None) -> str:
    """The written solution of numbers[0] `operation` numbers[1] ..., its answer in a box at the end.

    For 347 + 285: `7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{632}`; for 342 - 285: `12-5=7, 14-8-1=5, 3-2-1=0. \\boxed{57}`.
    """
    add = operation == "+"
    digits: list[int] = []
    lines: list[str] = []
    carry = 0
    for column in range(max(len(str(number)) for number in numbers)):
        kind, amount = (slip.kind, slip.amount) if slip and slip.column == column else ("", 0)
        terms = [number // 10**column % 10 for number in numbers]
        if kind == "copy":
            terms[-1] = (terms[-1] + amount) % 10
        if carry:
            terms.append(carry)
        if not add and terms[0] < sum(terms[1:]):
            terms[0] += 10
        result = sum(terms) if add else terms[0] - sum(terms[1:])
        if kind == "sum":
            result = abs(result + amount)
        lines.append(f"{operation.join(map(str, terms))}={result}")
        digits.append(result % 10)
        carry = result // 10 if add else int(terms[0] >= 10)
        if kind == "carry":
            carry = 0 if carry else 1
        if kind == "result":
            digits[-1] = (digits[-1] + amount) % 10
    top = str(carry) if add and carry else ""
    answer = int(top + "".join(map(str, reversed(digits))))
    return f"{', '.join(lines)}. \\boxed{{{answer}}}"


def work_out_wrongly(
    random: Random, operation: str, numbers: Sequence[int], kinds: Sequence[str] = SLIPS
) -> tuple[str, Slip]:
    """A written solution with one slip of one of these `kinds` and a wrong answer, and that slip."""
    right = work_out(operation, numbers).rpartition(" ")[2]
    columns = max(len(str(number)) for number in numbers)
    while True:
        amount = random.choice((-3, -2, -1, -1, 1, 1, 2, 3))
        slip = Slip(kind=random.choice(kinds), column=random.randrange(columns), amount=amount)
        wrong = work_out(operation, numbers, slip)
        if wrong.rpartition(" ")[2] != right:
            return wrong, slip


def review(numbers: Sequence[int], slip: Slip | None = None) -> str:
    """A verdict on a written solution, with its reason: `ok` or `no` for each column.

    For a wrong tens column: `ok, no, ok. <verify>reject</verify>`. A carry that was lost shows in the next column.
    """
    columns = max(len(str(number)) for number in numbers)
    blamed = -1 if slip is None else min(slip.column + (slip.kind == "carry"), columns - 1)
    checks = ", ".join("no" if column == blamed else "ok" for column in range(columns))
    return f"{checks}. <verify>{'reject' if slip else 'approve'}</verify>"
