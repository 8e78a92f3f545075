"""One agent that checks its own answer until it stands by it: a baseline between a lone agent and a team."""

from __future__ import annotations

from pydantic import PositiveInt

from rollout.base.tags import after_thought
from rollout.orchestras.answers import AnswerEnv, boxed, grade, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

register_agent(
    "self_verifier",
    system="You are a careful problem solver who checks his own work.",
    user="""# Problem
{problem}

# Your solution so far
{solution}

# What to do
If there is a solution above, go through it as if a stranger had written it: do its steps hold, does it answer what is
asked? Mend what is wrong, and keep what is right. If there is none, solve the problem. Reason step by step, and put
your final answer within \\boxed{{}}.""",
)(parse_boxed)


async def self_verify(task: Task, team: TeamSession, env: AnswerEnv, *, max_turns: PositiveInt = 3) -> None:
    """Let the agent `solver` answer, and answer again with its own reply in sight, until it gives the same answer twice
    in a row or `max_turns` are spent. Its last answer is final.

    Templates may use the slots `problem` and `solution`, the reply before without its thoughts, "" at the start. A
    malformed reply confirms nothing and cannot be confirmed; as the last one it leaves the team without an answer.
    Local score of a turn: the reward that its answer would have alone.

    Raises:
        EnvError: the environment cannot grade or compare single answers.
    """
    problem = env.reset(task)
    solution, answer = "", None
    for _ in range(max_turns):
        reply = await team.act("solver", problem=problem, solution=solution)
        await grade(team, env, reply)
        before, answer, solution = answer, reply.value, after_thought(reply.text)
        if before and answer and await env.same(answer, before):
            break
    await env.step(boxed(answer))
