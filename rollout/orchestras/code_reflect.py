"""UnityMAS-O's coding team: a planner, then a coder and a reflector in turn, with visible tests run in between."""

from __future__ import annotations

from typing import Protocol

from pydantic import PositiveInt

from rollout.base.tags import after_thought, last_tag
from rollout.environments.protocol import Env, Previewing
from rollout.orchestras.coder_tester import fenced, pass_rate
from rollout.orchestras.reason_tool import parse_program
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_SYSTEM = "You are a member of a team that solves programming problems."


@register_agent(
    "code_planner",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Your role
You are the planner. Choose an algorithm that is right and fast enough for the limits, and think of the edge cases. Then
write it down for the coder: <pseudocode> your plan </pseudocode>""",
)
def parse_plan(text: str) -> str | None:
    """The content of the last `<pseudocode>` tag after any thought, None when it is missing or empty."""
    return last_tag(after_thought(text), "pseudocode") or None


register_agent(
    "code_writer",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The plan
{plan}

# Programs so far, how they did on the visible tests, and what the reflector says
{history}

# Your role
You are the coder. Write the whole program into a block fenced by ```python and ```.""",
)(parse_program)


@register_agent(
    "reflector",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The plan
{plan}

# Programs so far, how they did on the visible tests, and what you said about them
{history}

# Your role
You are the reflector. Find the cause of the last program's failures and say how the coder mends it, without writing
the program yourself: <reflection> your advice </reflection>""",
)
def parse_reflection(text: str) -> str | None:
    """The content of the last `<reflection>` tag after any thought, None when it is missing or empty."""
    return last_tag(after_thought(text), "reflection") or None


class GradedEnv(Env, Previewing, Protocol):
    """A world in which programs can be tried and graded."""


async def code_reflect(task: Task, team: TeamSession, env: GradedEnv, *, max_turns: PositiveInt = 3) -> None:
    """Ask `planner`, then `coder` and `reflector` in turn, until a program passes the visible tests or `max_turns`
    programs are spent. The last program is final, and nobody reflects on it.

    Templates may use the slots `problem`, `plan` (all but the planner) and `history`: every program, what became of it
    on the visible tests, and the reflection. Of the planner and the reflector only the tag's content is handed on, ""
    when it is malformed. A reply without a program is tried as an empty one, and as the last one scored as none.

    Score `pass_rate` of every turn of the coder: the share of the task's tests that its program passes, 0 without one.
    These are the tests that decide the outcome, which nobody sees; the released code measures on the visible ones.

    Raises:
        EnvError: the environment cannot grade single programs.
    """
    problem = env.reset(task)
    plan = (await team.act("planner", problem=problem)).value or ""
    history = ""
    for turn in range(1, max_turns + 1):
        code = await team.act("coder", problem=problem, plan=plan, history=history)
        program = fenced(code.value)
        team.score(code.turn, pass_rate=await pass_rate(env, code.value))
        tried = await env.step(f"<run>\n{program}\n</run>")
        if turn == max_turns or (code.value and tried.metrics["visible_rate"] == 1):
            break
        history += f"{program or 'There was no program.'}\n{tried.observation}\n\n"
        reflection = await team.act("reflector", problem=problem, plan=plan, history=history)
        history += f"{reflection.value or ''}\n\n"
    await env.step(program)
