"""Stronger-MAS's ensemble: reasoners and tool users answer side by side, and a judge decides."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, ValidationInfo

from rollout.base.tags import after_thought
from rollout.orchestras.answers import ProgramEnv, boxed, compute, grade, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

register_agent(
    "judge",
    system="You judge solutions of math problems.",
    user="""# Problem
{problem}

# Solutions
{candidates}

# Your role
The solutions were found independently of each other, some by reasoning and some by a program, and any of them may be
wrong. Find out which one is right, or give the right answer if none is. Reason step by step, and put the final answer
within \\boxed{{}}.""",
)(parse_boxed)


def _somebody(tool_users: int, info: ValidationInfo) -> int:
    if not tool_users and not info.data.get("reasoners"):
        raise ValueError("expected at least 1 without reasoners")
    return tool_users


async def ensemble_judge(
    task: Task,
    team: TeamSession,
    env: ProgramEnv,
    *,
    reasoners: NonNegativeInt = 2,
    tool_users: Annotated[NonNegativeInt, AfterValidator(_somebody)] = 1,
) -> None:
    """Ask `reasoner` and `tool_user` so many times side by side, then `judge`, whose answer is final.

    Templates may use the slots `problem` and `history`, which is always "" (the roles are those of `reason_tool`), the
    judge's `problem` and `candidates`: what the reasoners said without their thoughts, then the tool users' programs
    with what came of them. A malformed reply is handed on as it was said, or as no program; a malformed judgement
    leaves the team without an answer. Local scores: of a reasoner and the judge 1 for the right answer, else 0; of a
    tool user 1, 0, or -1 when its program failed or there is none.

    Raises:
        EnvError: the environment cannot grade single answers, or cannot run programs.
    """
    problem = env.reset(task)

    async def reason() -> str:
        reply = await team.act("reasoner", problem=problem, history="")
        await grade(team, env, reply)
        return after_thought(reply.text)

    async def calculate() -> str:
        reply = await team.act("tool_user", problem=problem, history="")
        _, shown = await compute(team, env, reply)
        return f"```python\n{(reply.value or '').strip()}\n```\n{shown}"

    asked = [reason() for _ in range(reasoners)] + [calculate() for _ in range(tool_users)]
    found = await asyncio.gather(*asked)
    candidates = "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(found, start=1))
    verdict = await team.act("judge", problem=problem, candidates=candidates)
    await grade(team, env, verdict)
    await env.step(boxed(verdict.value))
