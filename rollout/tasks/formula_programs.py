"""Generated programming tasks: write a program that prints a formula of two numbers.

The module also generates demonstrations of agents that solve these tasks with a tool.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.environments.code import CodeEnv, pack_test
from rollout.orchestras.coding import tool_coder
from rollout.orchestras.replies import fenced
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.sandbox.judge import StdinTest
from rollout.tasks.splits import draw_different, split_of
from rollout.tasks.teaching import chat_demonstrations, tool_call_text
from rollout.teams.roles import Agent


@dataclass(frozen=True, slots=True)
class WordedFormula:
    """Formula of two numbers whose value a program prints.

    Attributes:
        value: computes the formula.
        wordings: wordings that tasks use for the value.
    """

    value: Callable[[int, int], int]
    wordings: tuple[str, ...]


# Formulas by their expression in Python.
FORMULAS: Mapping[str, WordedFormula] = {
    "a + b": WordedFormula(operator.add, ("their sum", "the total", "what they make together")),
    "a - b": WordedFormula(
        operator.sub,
        ("their difference", "the first less the second", "how far the first is above"),
    ),
    "a * b": WordedFormula(
        operator.mul,
        ("their product", "the area of such a field", "so many rows of so many"),
    ),
    "a // b": WordedFormula(
        operator.floordiv,
        ("the whole quotient", "how often the second fits", "the share of each"),
    ),
    "a % b": WordedFormula(
        operator.mod,
        ("the remainder", "what is left after division", "what cannot be shared"),
    ),
    "max(a, b)": WordedFormula(max, ("the larger one", "the greater one", "whichever is more")),
    "min(a, b)": WordedFormula(min, ("the smaller one", "the lesser one", "whichever is less")),
}

# Default probabilities of slips by agent.
CODER_SLIPS: Mapping[str, float] = {"coder": 0.6, "reviewer": 0.7}

# Share of wrong formulas that the coder notices when it tries them on the example.
_NOTICED_SHARE = 0.25


def program_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] tasks for each split: programs that print a value of two numbers.

    A task has an example. The two numbers of an example belong to one split.
    """
    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "programs", split))
        draw = partial(_draw, split, random)
        tasks += draw_different("programs", split, size, draw, key=lambda task: task.id)
    return tasks


def _draw(split: str, random: Random) -> Task | None:
    """Draw a task; None if its numbers belong to another split."""
    expression = random.choice(tuple(FORMULAS))
    formula = FORMULAS[expression]
    wording = random.choice(formula.wordings)
    a = random.randint(10, 49)
    b = random.randint(2, 9)
    hidden_inputs = [
        (random.randint(50, 99), random.randint(2, 9)),
        (random.randint(2, 9), random.randint(10, 99)),
    ]
    if split_of(f"programs {a} {b}") != split:
        return None

    tests = [
        StdinTest(stdin=f"{x} {y}\n", expected=f"{formula.value(x, y)}\n")
        for x, y in ((a, b), *hidden_inputs)
    ]
    answers = [pack_test(tests[0], visible=True)]
    answers += [pack_test(test, visible=False) for test in tests[1:]]
    return Task(
        id=f"programs:{expression}:{wording}:{a},{b}",
        prompt=f"Read two numbers and print {wording}. Of {a} and {b} it is {formula.value(a, b)}.",
        answers=tuple(answers),
        env="code",
        source="programs",
        split=split,
    )


def program_demonstrations(
    seed: int,
    n: int,
    *,
    agents: Mapping[str, Agent],
    slips: Mapping[str, Share] = CODER_SLIPS,
    max_turns: PositiveInt = 2,
    episodes: PositiveInt = 500,
) -> Iterator[Demonstration]:
    """Yield `n` chats of the team `tool_coder` on training tasks.

    The coder defines a formula in its Python session, tries it on the example, and hands it in. If
    it slips, it takes a wrong formula, or does not follow the reviewer; if the reviewer slips, it
    names a wrong one. The coder notices some wrong values. A policy that imitates this perfectly
    writes well-formed replies, which are wrong as often as right.

    Args:
        seed: seed of the run.
        n: number of chats.
        agents: the team as the rollout will use it.
        slips: probability of a slip by agent; 0 for an agent that is not named.
        max_turns: maximum number of programs, as in a rollout.
        episodes: number of plays; they are shown again once all were shown.
    """
    lessons = []
    for index, task in enumerate(program_tasks(seed, {"train": episodes})):
        random = Random(derive_seed(seed, "programs demonstration", index))
        lessons.append((task, _CodingTeacher(task, random, slips).reply))
    orchestra = partial(tool_coder, max_turns=max_turns, max_calls=3)
    return chat_demonstrations(lessons, CodeEnv, agents, orchestra, n)


class _CodingTeacher:
    """Scripted coder and reviewer of a task, who both know its formula, and slip."""

    def __init__(self, task: Task, random: Random, slips: Mapping[str, float]) -> None:
        _, formula, _, example = task.id.split(":")  # as `_draw` writes it
        a, b = map(int, example.split(","))
        self._task_formula = formula
        self._example_call = f"f({a}, {b})"
        self._example_value = str(FORMULAS[formula].value(a, b))
        self._random = random
        self._slips = slips
        self._formula = ""  # formula that the coder has tried last
        self._has_noticed = False  # the coder notices at most one wrong value of a task

    def reply(self, agent: str, messages: Sequence[Message]) -> str:
        """Return an agent's reply to its chat so far."""
        last = messages[-1]
        if agent == "reviewer":
            formula = self._take_or_slip(agent, self._task_formula)
            return f"<reflection> print {formula} </reflection>"

        if last.role != "tool":
            has_review = len(messages) > 2
            advice = last.content.rpartition("print ")[2] if has_review else self._task_formula
            return self._try(self._take_or_slip(agent, advice))

        is_wrong = last.content != self._example_value
        if is_wrong and not self._has_noticed and self._random.random() < _NOTICED_SHARE:
            self._has_noticed = True
            return self._try(self._take_or_slip(agent, self._task_formula))
        return fenced(f"a, b = map(int, input().split())\nprint({self._formula})")

    def _take_or_slip(self, agent: str, formula: str) -> str:
        """Return this formula, or another one if the agent slips."""
        others = [other for other in FORMULAS if other != formula]
        if self._random.random() < self._slips.get(agent, 0.0):
            return self._random.choice(others)
        return formula

    def _try(self, formula: str) -> str:
        """Return the tool calls that define a formula and print its value for the example's numbers."""
        self._formula = formula
        define = tool_call_text("python", code=f"f = lambda a, b: {formula}")
        show = tool_call_text("python", code=f"print({self._example_call})")
        return f"{define}\n{show}"
