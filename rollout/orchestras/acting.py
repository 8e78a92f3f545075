"""Multi-turn orchestras, whose agents act in an environment: one alone, one that checks itself, a team for games.

Args:
    max_turns: turns of the team, at most.
    tool: how a reply becomes a list of actions: `actions`, as the reply says it; `program`, as the program in the
        reply prints it (of games, role `game_coder`).
"""

import asyncio
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import PlayedEnv, after_thought
from rollout.orchestras.replies import boxed, graded, parse_listed
from rollout.records.trajectory import Task
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession

ProposalStyle = Literal["actions", "program"]


async def _proposed(style: ProposalStyle, reply: AgentReply, env: PlayedEnv) -> str:
    """The actions that a reply states itself, or that its program prints.

    "" when it is malformed, when the program fails, or when that prints none.
    """
    if style == "actions" or reply.value is None:
        return reply.value or ""
    call = await env.run(reply.value)
    return "" if call.failed else parse_listed(call.result) or ""


async def game_team(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    order: Literal["sequential", "simultaneous"] = "sequential",
    tool: ProposalStyle = "actions",
) -> None:
    """Play one puzzle: in each turn the agent `tool` proposes and the agent `planner` acts, until the puzzle has ended.

    The planner alone steps the environment; a malformed reply steps it with "". Templates may use the slots `problem`
    (as `reset` gave it), `state` (the last observation; at the start the task's prompt) and `history` (every step with
    its observation), the planner's also `proposal`, a list of actions.

    Local scores, as in Stronger-MAS: of the tool agent, the reward that its own proposal would have had; of the
    planner, the reward that its actions had.

    Args:
        order: `sequential`: the planner sees the proposal of this turn; `simultaneous`: both agents are asked at once,
            and the planner sees the proposal of the turn before, which is what Stronger-MAS's released code amounts to.
    """
    problem = env.reset(task)
    state, history, earlier = task.prompt, "", ""

    async def propose(slots: dict[str, str]) -> str:
        idea = await team.act("tool", **slots)
        actions = await _proposed(tool, idea, env)
        imagined = await env.preview(actions)
        team.score(
            idea.turn, local=imagined.reward
        )  # before anybody else is asked: a tree chooses by it
        return actions

    for _ in range(max_turns):
        slots = {"problem": problem, "state": state, "history": history}
        if order == "sequential":
            proposal = await propose(slots)
            plan = await team.act("planner", **slots, proposal=proposal)
        else:
            proposal, plan = await asyncio.gather(
                propose(slots), team.act("planner", **slots, proposal=earlier)
            )
        step = await env.step(plan.value or "")
        team.score(plan.turn, local=step.reward)
        if step.done:
            return
        state, earlier = step.observation, proposal
        history += f"{plan.value or '(no actions)'}\n{step.observation}\n"


async def single(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_turns: PositiveInt = 5,
    tool: ProposalStyle = "actions",
) -> None:
    """Let the agent `player` act until the environment has ended or `max_turns` are spent.

    The environment is stepped with what the role's parser made of the reply, "" when it is malformed. Templates may use
    the slots `problem` (as `reset` gave it), `state` (the last observation; at the start the task's prompt) and
    `history` (every step with its action and observation).
    """
    problem = env.reset(task)
    state, history = task.prompt, ""
    for _ in range(max_turns):
        reply = await team.act("player", problem=problem, state=state, history=history)
        action = await _proposed(tool, reply, env)
        step = await env.step(action)
        if step.done:
            return
        state = step.observation
        history += f"{action or '(no actions)'}\n{step.observation}\n"


async def self_verify(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 3
) -> None:
    """Let the agent `solver` answer, and answer again with its own reply in sight, until it gives the same answer twice
    in a row or `max_turns` are spent. Its last answer is final.

    Templates may use the slots `problem` and `solution`, the reply before without its thoughts, "" at the start. A
    malformed reply confirms nothing and cannot be confirmed; as the last one it leaves the team without an answer.
    Local score of a turn: the reward that its answer would have alone.

    Args:
        max_turns: answers of the solver, at most.
    """
    problem = env.reset(task)
    solution, answer = "", None
    for _ in range(max_turns):
        reply = await graded(team, env, "solver", problem=problem, solution=solution)
        before, answer, solution = answer, reply.value, after_thought(reply.text)
        if before and answer and await env.same(answer, before):
            break
    await env.step(boxed(answer))
