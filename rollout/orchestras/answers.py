"""Grading and voting that teams share: how a boxed answer or a program's is scored alone, computed and voted on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rollout.base.errors import Undecided
from rollout.environments.math import last_boxed
from rollout.environments.protocol import Comparing, Env, Previewing, Running
from rollout.sandbox.records import NO_OUTPUT
from rollout.teams.team import AgentReply, TeamSession


class AnswerEnv(Env, Previewing, Comparing, Protocol):
    """A world in which single answers can be graded and compared."""


class ProgramEnv(AnswerEnv, Running, Protocol):
    """One that also runs programs."""


class GradedEnv(Env, Previewing, Protocol):
    """A world in which programs can be tried and graded."""


def boxed(answer: str | None) -> str:
    """An answer as the environment takes it; "" without one, which is scored as a wrong answer."""
    return f"\\boxed{{{answer}}}" if answer else ""


async def grade(team: TeamSession, env: AnswerEnv, reply: AgentReply) -> float | None:
    """Write down the local score of a boxed answer, the reward that it would have alone; returns it.

    A malformed reply, one that was cut off included, is graded as no answer. What the environment cannot decide has no
    local score but the score `undecided`, 1, and the result is None.
    """
    return await _grade(team, env, reply.turn, reply.value)


async def _grade(team: TeamSession, env: AnswerEnv, turn: int, answer: str | None) -> float | None:
    try:
        step = await env.preview(boxed(answer))
    except Undecided:
        team.score(turn, undecided=1.0)
        return None
    team.score(turn, local=step.reward)  # before anybody else is asked: a tree chooses by it
    return step.reward


async def graded(team: TeamSession, env: AnswerEnv, name: str, **slots: object) -> AgentReply:
    """The reply of an agent who is asked for a boxed answer, after its local score was written down; see `grade`."""
    reply = await team.act(name, **slots)
    await grade(team, env, reply)
    return reply


async def calculated(team: TeamSession, env: ProgramEnv, **slots: object) -> tuple[str | None, str]:
    """The answer of the agent `tool_user` (see `compute`), and its program with what came of it."""
    reply = await team.act("tool_user", **slots)
    answer, shown = await compute(team, env, reply)
    return answer, with_output((reply.value or "").strip(), shown)


def numbered(texts: Iterable[str]) -> str:
    """Solutions as those read them who compare them."""
    return "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(texts, start=1))


def with_output(program: str, output: str) -> str:
    """A program with what it printed, as it is read later."""
    return f"```python\n{program}\n```\n{output}"


async def vote(env: AnswerEnv, answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, in the words in which it was given first; of equally frequent ones the first.

    None does not vote, and is the result when nobody does.
    """
    kinds: list[list[str]] = []
    for answer in answers:
        if answer is None:
            continue
        for kind in kinds:
            if await env.same(answer, kind[0]):
                kind.append(answer)
                break
        else:
            kinds.append([answer])
    return max(kinds, key=len)[0] if kinds else None  # max keeps the first of equals


async def compute(team: TeamSession, env: ProgramEnv, reply: AgentReply) -> tuple[str | None, str]:
    """Run the program of a tool user's reply, and write down its local score.

    The score is Stronger-MAS's: 1 for the right answer, 0 for a wrong one, -1 when the program failed or there is none.

    Returns:
        The answer, the last line that the program printed (the content of its box, if it has one), or None; and what
        the tool user's partners may read about the run.
    """
    if reply.value is None:
        team.score(reply.turn, local=-1.0)
        return None, "There was no program."
    call = await env.run(reply.value)
    if call.failed:
        team.score(reply.turn, local=-1.0)
        return None, call.result
    line = "" if call.result == NO_OUTPUT else call.result.splitlines()[-1].strip()
    content = last_boxed(line)
    answer = (line if content is None else content) or None
    await _grade(team, env, reply.turn, answer)
    return answer, call.result
