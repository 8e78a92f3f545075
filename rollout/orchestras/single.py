"""Single-agent baselines: one agent alone in any environment (multi-turn), and one that checks its own answer."""

from __future__ import annotations

from pydantic import PositiveInt

from rollout.base.tags import after_thought
from rollout.environments.protocol import Env
from rollout.orchestras.answers import AnswerEnv, boxed, graded
from rollout.orchestras.game_team import PROPOSALS, Tool
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


async def single(
    task: Task, team: TeamSession, env: Env, *, max_turns: PositiveInt = 5, tool: Tool = "actions"
) -> None:
    """Let the agent `player` act until the environment has ended or `max_turns` are spent.

    The environment is stepped with what the role's parser made of the reply, "" when it is malformed. Templates may use
    the slots `problem` (as `reset` gave it), `state` (the last observation; at the start the task's prompt) and
    `history` (every step with its action and observation). With `tool: program` the parser's value is a program, in
    games (role `game_coder`), and the environment is stepped with the list of actions that it prints.

    Raises:
        EnvError: the environment cannot run a program.
    """
    problem = env.reset(task)
    state, history = task.prompt, ""
    for _ in range(max_turns):
        reply = await team.act("player", problem=problem, state=state, history=history)
        action = await PROPOSALS[tool](reply, env)
        step = await env.step(action)
        if step.done:
            return
        state = step.observation
        history += f"{action or '(no actions)'}\n{step.observation}\n"


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
        reply = await graded(team, env, "solver", problem=problem, solution=solution)
        before, answer, solution = answer, reply.value, after_thought(reply.text)
        if before and answer and await env.same(answer, before):
            break
    await env.step(boxed(answer))
