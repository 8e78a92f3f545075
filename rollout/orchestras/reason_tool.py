"""Stronger-MAS's math team: one agent calculates with Python, one reasons, until their answers agree."""

from __future__ import annotations

import asyncio

from pydantic import PositiveInt

from rollout.base.tags import after_thought
from rollout.environments.code import last_program
from rollout.orchestras.answers import ProgramEnv, boxed, compute, grade, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import AgentReply, TeamSession, register_agent

_SYSTEM = "You are a member of a team of two that solves math problems."
_USER = """# Problem
{problem}

# What you and your partner said so far
{history}

# Your role
"""

register_agent(
    "reasoner",
    system=_SYSTEM,
    user=_USER
    + """You reason; your partner calculates with Python. Where you disagreed, find out who is right. Reason step by
step, and put your final answer within \\boxed{{}}.""",
)(parse_boxed)


@register_agent(
    "tool_user",
    system=_SYSTEM,
    user=_USER
    + """You calculate; your partner reasons without tools. Where you disagreed, find out who is right. Write one
complete Python program in a block fenced by ```python and ```. It is run once, without input, and the last line that it
prints must be the answer alone.""",
)
def parse_program(text: str) -> str | None:
    """The last program in its fence after any thought, None when there is none or it is blank."""
    return last_program(text)


async def reason_tool(task: Task, team: TeamSession, env: ProgramEnv, *, max_turns: PositiveInt = 4) -> None:
    """Ask `tool_user` and `reasoner` side by side until their answers are equal or `max_turns` are spent.

    The reasoner's last answer is final. Templates may use the slots `problem` and `history`, all turns before: what
    the reasoner said without its thoughts, the tool user's program and what came of it. The tool user's answer is the
    last line that its program printed. A malformed reply has no answer and so agrees with nothing; from the reasoner as
    the last one it leaves the team without an answer. Local scores, as in Stronger-MAS: of the reasoner 1 for the right
    answer, else 0; of the tool user 1, 0, or -1 when its program failed or there is none.

    Raises:
        EnvError: the environment cannot grade or compare single answers, or cannot run programs.
    """
    problem = env.reset(task)
    history = ""

    async def calculate() -> tuple[str | None, str]:
        reply = await team.act("tool_user", problem=problem, history=history)
        answer, shown = await compute(team, env, reply)
        return answer, f"```python\n{(reply.value or '').strip()}\n```\n{shown}"

    async def reason() -> AgentReply:
        reply = await team.act("reasoner", problem=problem, history=history)
        await grade(team, env, reply)
        return reply

    for _ in range(max_turns):
        (computed, shown), reasoned = await asyncio.gather(calculate(), reason())
        if computed and reasoned.value and await env.same(computed, reasoned.value):
            break
        history += f"[The program and what it printed]\n{shown}\n\n[The reasoner]\n{after_thought(reasoned.text)}\n\n"
    await env.step(boxed(reasoned.value))
