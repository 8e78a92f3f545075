"""Stronger-MAS's coding team: a coder and a unit tester side by side, until the program passes the tests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Protocol

from pydantic import PositiveInt

from rollout.base.errors import EnvError
from rollout.base.tags import after_thought
from rollout.environments.protocol import Case, Env, Previewing, Testing
from rollout.orchestras.reason_tool import parse_program
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_CASE = re.compile(r"<input>(.*?)</input>\s*<output>(.*?)</output>", re.DOTALL)
_SYSTEM = "You are a member of a team of two that solves programming problems."
_USER = """# Problem
{problem}

# Programs so far, and how they did on your team's own tests
{history}

# Your role
"""

register_agent(
    "coder",
    system=_SYSTEM,
    user=_USER
    + """You are the coder; your partner writes tests. A program that fails a test above may be wrong, or the test may
be. Find out, and write the whole program into a block fenced by ```python and ```.""",
)(parse_program)


@register_agent(
    "tester",
    system=_SYSTEM,
    user=_USER
    + """You are the tester; your partner writes the program. Write a few tests whose right answers you are sure of,
edge cases among them, each in this form:
<input>what the program reads</input>
<output>what it must print</output>
Where the problem asks for a function, the input is a JSON list of its arguments and the output its result as JSON.""",
)
def parse_cases(text: str) -> str | None:
    """The tests as a JSON list of [input, output]; None when there is none or a tag stands outside a test."""
    text = after_thought(text)
    cases = [(given.strip(), expected.strip()) for given, expected in _CASE.findall(text)]
    tags = [text.count(tag) for tag in ("<input>", "</input>", "<output>", "</output>")]
    return json.dumps(cases) if cases and tags == [len(cases)] * 4 else None


class TestedEnv(Env, Previewing, Testing, Protocol):
    """A world in which programs can be graded, and tried on the agents' own tests."""


async def coder_tester(
    task: Task,
    team: TeamSession,
    env: TestedEnv,
    *,
    max_turns: PositiveInt = 5,
    max_cases: PositiveInt = 8,
    malformed: float = -2.0,
) -> None:
    """Ask `coder` and `tester` side by side until the program passes all the tests, or `max_turns` are spent.

    The last program is final. Templates may use the slots `problem` and `history`: every program with what came of it
    on the first `max_cases` tests written beside it, mismatches in full. After a malformed reply of either there is
    nothing to run, and they go on; a malformed last program leaves the team without one.

    Local scores, as in Stronger-MAS: of the coder the share of the task's tests that its program passes; of the tester
    the share of its tests that the task's own solution passes, none where the task has no solution (the reward
    `local_team` then wants `missing_local: zero`); `malformed` of either for a malformed reply.

    Raises:
        EnvError: the environment cannot grade programs or run the agents' tests.
    """
    problem = env.reset(task)
    history = ""
    for _ in range(max_turns):
        slots = {"problem": problem, "history": history}
        coded, tested = await asyncio.gather(team.act("coder", **slots), team.act("tester", **slots))
        cases: list[Case] = [(given, expected) for given, expected in json.loads(tested.value or "[]")][:max_cases]
        team.score(coded.turn, local=malformed if coded.value is None else await pass_rate(env, coded.value))
        agreed = await env.agreement(cases) if cases else malformed
        if agreed is not None:
            team.score(tested.turn, local=agreed)
        if coded.value is None or not cases:
            history += f"There was no {'program' if coded.value is None else 'test'}.\n\n"
            continue
        tried = await env.check(coded.value, cases)
        if tried.metrics["check_rate"] == 1:
            break
        history += f"{fenced(coded.value)}\n{tried.observation}\n\n"
    await env.step(fenced(coded.value))


async def pass_rate(env: Previewing, program: str | None) -> float:
    """The share of the task's tests that a program passes, 0 without one.

    Raises:
        EnvError: the environment grades no programs.
    """
    graded = await env.preview(fenced(program))
    if "pass_rate" not in graded.metrics:
        raise EnvError("the environment grades no programs; name code in env")
    return graded.metrics["pass_rate"]


def fenced(program: str | None) -> str:
    """A program as the environment takes it; "" without one, which is scored as failing every test."""
    return f"```python\n{program.rstrip()}\n```" if program else ""
