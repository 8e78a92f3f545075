"""Chats as demonstrations: the real team plays and a teacher speaks for its agents; and short programs to teach so."""

import asyncio
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from random import Random

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.engines import ChatState, PolicyReply
from rollout.environments.code import CodeEnv, pack_test
from rollout.environments.protocol import Env
from rollout.models.tool_calls import in_words
from rollout.orchestras.coding import tool_coder
from rollout.orchestras.replies import fenced
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import EMPTY_COMPLETION, Demonstration, Message, Sampling, Task
from rollout.sandbox.judge import StdinTest
from rollout.tasks.splits import draw_different, split_of
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.roles import Agent, AgentReply, Role
from rollout.teams.team import Team, TeamSession

Teacher = Callable[[str, Sequence[Message]], str]  # (agent, its chat so far) -> its reply


class TeachingSession(TeamSession):
    """A team that knows what to say, slips now and then, and writes down what it said."""

    def __init__(
        self, roles: Mapping[str, Role], slips: Mapping[str, float], random: Random
    ) -> None:
        """`slips`: probability of a slip by agent; 0 for one that is not named."""
        super().__init__(Team({}, {}), ())
        self._roles, self._slips, self._random = roles, slips, random
        self.demonstrations: list[Demonstration] = []

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        role, text = self._roles[name], self.said_by(name, slots)
        reply = Message(role="assistant", content=text)
        self.demonstrations.append(
            Demonstration(agent=name, messages=(*role.messages(**slots), reply))
        )
        return AgentReply(text=text, value=role.parse(text), turn=len(self.demonstrations) - 1)

    def said_by(self, agent: str, slots: Mapping[str, object]) -> str:
        """What an agent says."""
        raise NotImplementedError

    def score(self, index: int, /, **scores: float) -> None:
        """Demonstrations are not scored."""

    def slip(self, agent: str) -> bool:
        """Whether an agent slips now."""
        return self._random.random() < self._slips.get(agent, 0.0)


@dataclass(frozen=True, slots=True)
class _Voice:
    """A policy that says what the teacher says for one agent, and keeps its chats as they stand."""

    agent: str
    teacher: Teacher
    chats: dict[str, Demonstration]

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        assert chat is not None
        text = self.teacher(self.agent, messages)
        said = in_words([*messages, Message(role="assistant", content=text)], chat.tools)
        self.chats[chat.id] = Demonstration(agent=self.agent, messages=tuple(said))
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=EMPTY_COMPLETION)


def taught(
    lessons: Iterable[tuple[Task, Teacher]],
    make_env: Callable[[Task], Env],
    agents: Mapping[str, Agent],
    orchestra: Orchestra,
    n: int,
) -> Iterator[Demonstration]:
    """`n` chats, whole, as `orchestra` plays them with the agents' own tools; those of all lessons over and over.

    Raises:
        ValueError: a play failed.
    """

    async def play() -> list[Demonstration]:
        shown: list[Demonstration] = []
        for task, teacher in lessons:
            chats: dict[str, Demonstration] = {}
            seats = {name: replace(agent, policy=name) for name, agent in agents.items()}
            team = Team(seats, {name: _Voice(name, teacher, chats) for name in agents})
            episode = Episode(task, team.session("demonstration", task.id), make_env, orchestra)
            await episode.play()
            if episode.error:
                raise ValueError(f"the demonstration of task {task.id} failed: {episode.error}")
            shown += chats.values()
        return shown

    return islice(cycle(asyncio.run(play())), n)


def asked_for(tool: str, **arguments: str) -> str:
    """A call of a tool, as a model writes it whose template knows none."""
    return f"```tool\n{json.dumps({'name': tool, 'arguments': arguments})}\n```"


# what a program prints of two numbers, and how that is asked for
WORDED_FORMULAS: Mapping[str, tuple[Callable[[int, int], int], tuple[str, ...]]] = {
    "a + b": (operator.add, ("their sum", "the total", "what they make together")),
    "a - b": (
        operator.sub,
        ("their difference", "the first less the second", "how far the first is above"),
    ),
    "a * b": (
        operator.mul,
        ("their product", "the area of such a field", "so many rows of so many"),
    ),
    "a // b": (
        operator.floordiv,
        ("the whole quotient", "how often the second fits", "the share of each"),
    ),
    "a % b": (
        operator.mod,
        ("the remainder", "what is left after division", "what cannot be shared"),
    ),
    "max(a, b)": (max, ("the larger one", "the greater one", "whichever is more")),
    "min(a, b)": (min, ("the smaller one", "the lesser one", "whichever is less")),
}
CARELESS_CODERS: Mapping[str, float] = {"coder": 0.6, "reviewer": 0.7}
_NOTICED = 0.25  # of formulas whose value of the example is another


def program_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """sizes[split] short programs to write: what to print of two numbers, with an example, which one split owns."""
    tasks = []
    for split, size in sizes.items():
        draw = partial(_draw, split, Random(derive_seed(seed, "programs", split)))
        tasks += draw_different("programs", split, size, draw, key=lambda task: task.id)
    return tasks


def _draw(split: str, random: Random) -> Task | None:
    formula = random.choice(tuple(WORDED_FORMULAS))
    value, wordings = WORDED_FORMULAS[formula]
    what, a, b = random.choice(wordings), random.randint(10, 49), random.randint(2, 9)
    hidden = [
        (random.randint(50, 99), random.randint(2, 9)),
        (random.randint(2, 9), random.randint(10, 99)),
    ]
    tests = [
        StdinTest(stdin=f"{x} {y}\n", expected=f"{value(x, y)}\n") for x, y in ((a, b), *hidden)
    ]
    task = Task(
        id=f"programs:{formula}:{what}:{a},{b}",
        prompt=f"Read two numbers and print {what}. Of {a} and {b} it is {value(a, b)}.",
        answers=tuple(pack_test(test, visible=not i) for i, test in enumerate(tests)),
        env="code",
        source="programs",
        split=split,
    )
    return task if split_of(f"programs {a} {b}") == split else None


def program_demonstrations(
    seed: int,
    n: int,
    *,
    agents: Mapping[str, Agent],
    slips: Mapping[str, Share] = CARELESS_CODERS,
    max_turns: PositiveInt = 2,
    episodes: PositiveInt = 500,
) -> Iterator[Demonstration]:
    """`n` chats of the team `tool_coder` on training tasks.

    The coder defines a formula in its Python session, tries it on the example, and hands it in. With a probability of
    `slips` it takes a wrong one, or does not follow the reviewer, who with its own names a wrong one. It notices some
    wrong values. A policy that imitates this perfectly is well formed and as often wrong as right.

    Args:
        agents: the team as the rollout will use it.
        slips: probability of a slip by agent; 0 for an agent that is not named.
        max_turns: programs, at most, as at rollout.
        episodes: plays that are shown, over and over.
    """
    lessons = [
        (task, _Coders(task, Random(derive_seed(seed, "programs demonstration", i)), slips).say)
        for i, task in enumerate(program_tasks(seed, {"train": episodes}))
    ]
    return taught(
        lessons, CodeEnv, agents, partial(tool_coder, max_turns=max_turns, max_calls=3), n
    )


class _Coders:
    """A coder and a reviewer who know the formula, and slip."""

    def __init__(self, task: Task, random: Random, slips: Mapping[str, float]) -> None:
        _, self._right, _, example = task.id.split(":")
        self._a, self._b = map(int, example.split(","))
        self._random, self._slips = random, slips
        self._formula = ""  # that the coder is at
        self._noticed = False  # that one was wrong; once is enough

    def say(self, agent: str, messages: Sequence[Message]) -> str:
        last = messages[-1]
        if agent == "reviewer":
            return f"<reflection> print {self._pick(agent, self._right)} </reflection>"
        if last.role != "tool":
            advice = last.content.rpartition("print ")[2] if len(messages) > 2 else self._right
            return self._try(self._pick(agent, advice))
        right = str(WORDED_FORMULAS[self._right][0](self._a, self._b))
        if last.content != right and not self._noticed and self._random.random() < _NOTICED:
            self._noticed = True
            return self._try(self._pick(agent, self._right))
        return fenced(f"a, b = map(int, input().split())\nprint({self._formula})")

    def _pick(self, agent: str, right: str) -> str:
        wrong = [formula for formula in WORDED_FORMULAS if formula != right]
        return (
            self._random.choice(wrong)
            if self._random.random() < self._slips.get(agent, 0.0)
            else right
        )

    def _try(self, formula: str) -> str:
        self._formula = formula
        shown = f"print(f({self._a}, {self._b}))"
        return f"{asked_for('python', code=f'f = lambda a, b: {formula}')}\n{asked_for('python', code=shown)}"
