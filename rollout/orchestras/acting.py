"""Orchestras whose agents act in an environment over several turns.

`single` is one agent alone, `self_verify` one that checks its own answer, `game_team` a team for
games.

Args:
    max_turns: maximum number of steps of the environment; before each, every agent of the team is
        asked once.
    actions_from: place that lists the actions of the agent `tool` or `player`: `reply`, the agent's
        reply; `program`, the output of the program in the reply, for an agent that writes programs,
        such as role `game_coder`.
"""

import asyncio
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import PlayedEnv, after_thought
from rollout.orchestras.answers import ask_for_answer, boxed
from rollout.orchestras.replies import parse_listed
from rollout.records.trajectory import Task
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession

ActionsFrom = Literal["reply", "program"]


async def _proposed_actions(actions_from: ActionsFrom, reply: AgentReply, env: PlayedEnv) -> str:
    """Return the actions that a reply lists itself, or that the output of its program lists.

    The result is "" if the reply is malformed, or if its program fails or prints no actions.
    """
    if actions_from == "reply" or reply.value is None:
        return reply.value or ""
    call = await env.run(reply.value)
    if call.failed:
        return ""
    return parse_listed(call.result) or ""


async def game_team(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    order: Literal["sequential", "simultaneous"] = "sequential",
    actions_from: ActionsFrom = "reply",
) -> None:
    """Play one puzzle: before each step the agent `tool` proposes actions, and `planner` acts.

    Only the planner steps the environment; a malformed reply steps it with "". Templates may use
    the slots `problem` (the result of `reset`), `state` (the last observation; at first the task's
    prompt) and `history` (every step with its observation). The planner's template may also use
    `proposal`, a list of actions.

    Local scores are those of Stronger-MAS: the tool agent's score is the reward that its proposal
    would have earned; the planner's is the reward that its actions earned.

    Args:
        order: `sequential`: the planner sees the proposal for this step; `simultaneous`: both agents
            are asked at once, and the planner sees the proposal for the step before, as in the
            released code of Stronger-MAS.
    """
    problem = env.reset(task)
    state = task.prompt
    history = ""
    previous_proposal = ""

    async def propose(slots: dict[str, str]) -> str:
        reply = await team.act("tool", **slots)
        actions = await _proposed_actions(actions_from, reply, env)
        preview = await env.preview(actions)
        # A tree selects its branch by this score, so it is recorded before another agent is asked.
        team.score(reply.turn, local=preview.reward)
        return actions

    for _ in range(max_turns):
        slots = {"problem": problem, "state": state, "history": history}
        if order == "sequential":
            proposal = await propose(slots)
            plan = await team.act("planner", **slots, proposal=proposal)
        else:
            proposal, plan = await asyncio.gather(
                propose(slots), team.act("planner", **slots, proposal=previous_proposal)
            )
        step = await env.step(plan.value or "")
        team.score(plan.turn, local=step.reward)
        if step.done:
            return
        state = step.observation
        previous_proposal = proposal
        history += f"{plan.value or '(no actions)'}\n{step.observation}\n"


async def single(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    actions_from: ActionsFrom = "reply",
) -> None:
    """Let the agent `player` act until the task ends, or for `max_turns` steps.

    The environment is stepped with the actions that the player lists, or with "" if there are none.
    Templates may use the slots `problem` (the result of `reset`), `state` (the last observation; at
    first the task's prompt) and `history` (every action with its observation).
    """
    problem = env.reset(task)
    state = task.prompt
    history = ""
    for _ in range(max_turns):
        reply = await team.act("player", problem=problem, state=state, history=history)
        action = await _proposed_actions(actions_from, reply, env)
        step = await env.step(action)
        if step.done:
            return
        state = step.observation
        history += f"{action or '(no actions)'}\n{step.observation}\n"


async def self_verify(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 3
) -> None:
    """Let the agent `solver` answer repeatedly, until it gives the same answer twice in a row.

    The last answer is final. Templates may use the slots `problem` and `solution`; `solution` is the
    previous reply without its thought, and "" at first. A malformed reply neither confirms an answer
    nor can be confirmed; if it is the last one, the team has no answer. The score `local` of a turn
    is the reward that its answer alone would have.

    Args:
        max_turns: maximum number of answers of the solver.
    """
    problem = env.reset(task)
    solution = ""
    answer: str | None = None
    for _ in range(max_turns):
        reply = await ask_for_answer(team, env, "solver", problem=problem, solution=solution)
        previous_answer = answer
        answer = reply.value
        solution = after_thought(reply.text)
        if previous_answer and answer and await env.same(answer, previous_answer):
            break
    await env.step(boxed(answer))
