"""MathChat as coached in MAPPA: a problem solver, a code executor with up to two programs, and a verifier."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from rollout.base.tags import after_thought
from rollout.orchestras.answers import ProgramEnv, boxed, parse_boxed
from rollout.orchestras.reason_tool import parse_program
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_SYSTEM = "You are a member of a team of three that solves math problems."

register_agent(
    "chat_solver",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Your role
You are the problem solver. Work out how the problem is solved, step by step, and put your answer within \\boxed{{}}. A
colleague will check it with a program.""",
)(parse_boxed)

register_agent(
    "chat_coder",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The problem solver's solution
{solution}

# Your programs so far, and what they printed
{history}

# Your role
You are the code executor. Write one complete Python program that finds the answer independently and prints it with
whatever tells whether the solution is right. Put it into a block fenced by ```python and ```.""",
)(parse_program)

register_agent(
    "chat_verifier",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The problem solver's solution
{solution}

# The code executor's programs, and what they printed
{history}

# Your role
You are the verifier. Weigh what you have against each other and decide. Put the final answer within \\boxed{{}}.""",
)(parse_boxed)


async def mathchat(
    task: Task,
    team: TeamSession,
    env: ProgramEnv,
    *,
    max_programs: PositiveInt = 2,
    verifier_reads: Literal["all", "programs"] = "all",
) -> None:
    """Ask `solver`, `coder` and `verifier` in this order; the verifier's answer is final.

    The coder is asked again, `max_programs` times in all, when its program failed or its reply had none. Templates may
    use the slots `problem`, the coder's and the verifier's also `solution`, what the solver said without its thoughts,
    and `history`, every program with what came of it. With `programs` the verifier's `solution` is "", as in the
    released code. A malformed solution is handed on as it was said; a malformed last reply leaves the team without an
    answer. Nobody is scored alone: that is the coach's part.

    Raises:
        EnvError: the environment cannot run programs.
    """
    problem = env.reset(task)
    solution = after_thought((await team.act("solver", problem=problem)).text)
    history = ""
    for _ in range(max_programs):
        program = (await team.act("coder", problem=problem, solution=solution, history=history)).value
        if program is None:
            history += "There was no program.\n\n"
            continue
        call = await env.run(program)
        history += f"```python\n{program.strip()}\n```\n{call.result}\n\n"
        if not call.failed:
            break
    read = solution if verifier_reads == "all" else ""
    final = await team.act("verifier", problem=problem, solution=read, history=history)
    await env.step(boxed(final.value))
