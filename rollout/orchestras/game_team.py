"""Stronger-MAS's team for games: a tool agent proposes actions, a plan agent decides which are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import PositiveInt

from rollout.base.errors import EnvError
from rollout.environments.code import last_program
from rollout.environments.protocol import Env, Previewing, Running
from rollout.records.trajectory import Task
from rollout.teams.team import AgentReply, TeamSession, register_agent

LISTED = "**Actions List**:"  # what a proposal starts with, in a reply as in the output of a program
DECIDED = "####"  # what the final actions start with
_SYSTEM = "You are a member of a team of two that solves puzzles."


@register_agent(
    "game_tool",
    system=_SYSTEM,
    user="""# Puzzle
{problem}

# What was done so far, and what came of it
{history}

# Now
{state}

# Your role
You propose what to do; your partner decides. Look for a list of actions that solves the puzzle from where it stands
now, or else goes as far towards it as you can see. Think first. Then end with one line:
**Actions List**: your actions""",
)
def parse_listed(text: str) -> str | None:
    """The rest of the last line that starts with `**Actions List**:`, None when there is none or nothing follows."""
    lines = [line.strip() for line in text.splitlines()]
    listed = [line.removeprefix(LISTED).strip() for line in lines if line.startswith(LISTED)]
    return (listed or [""])[-1] or None


@register_agent(
    "game_planner",
    system=_SYSTEM,
    user="""# Puzzle
{problem}

# What was done so far, and what came of it
{history}

# Now
{state}

# Your partner's proposal
{proposal}

# Your role
You decide what is done. Follow the proposal step by step; take it over when it is right, mend or replace it when it is
not. Think first. Then end with the final actions on one line:
#### your actions""",
)
def parse_decided(text: str) -> str | None:
    """What follows the last `####`; None when it is missing, nothing follows, or more than one line does."""
    _, sign, actions = text.rpartition(DECIDED)
    actions = actions.strip()
    return actions if sign and actions and "\n" not in actions else None


@register_agent(
    "game_coder",
    system=_SYSTEM,
    user="""# Puzzle
{problem}

# What was done so far, and what came of it
{history}

# Now
{state}

# Your role
You write a program that finds out what to do; your partner decides. Write one complete Python program that works out a
list of actions which solves the puzzle from where it stands now. Write the puzzle down in the program: it reads no
input. The last line that it prints must be
**Actions List**: the actions
Put the program into one block fenced by ```python and ```.""",
)
def parse_program(text: str) -> str | None:
    """The last program in its fence after any thought, None when there is none or it is blank."""
    return last_program(text)


async def _stated(proposal: AgentReply, env: Env) -> str:
    """The proposed actions as the tool agent states them itself; "" when its reply is malformed."""
    return proposal.value or ""


async def _printed(proposal: AgentReply, env: Env) -> str:
    """The actions that the tool agent's program prints; "" without a program, when it fails, or when it prints none."""
    if proposal.value is None:
        return ""
    if not isinstance(env, Running):
        raise EnvError(f"{type(env).__name__} cannot run a program; choose orchestra.options.tool: actions")
    call = await env.run(proposal.value)
    return "" if call.failed else parse_listed(call.result) or ""


Tool = Literal["actions", "program"]
# how a tool agent's reply becomes a list of actions
PROPOSALS: dict[Tool, Callable[[AgentReply, Env], Awaitable[str]]] = {"actions": _stated, "program": _printed}


async def game_team(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_turns: PositiveInt = 5,
    order: Literal["sequential", "simultaneous"] = "sequential",
    tool: Tool = "actions",
) -> None:
    """Play one puzzle: in each turn the agent `tool` proposes and the agent `planner` acts, until the puzzle has ended.

    The planner alone steps the environment; a malformed reply steps it with "". Templates may use the slots `problem`
    (as `reset` gave it), `state` (the last observation; at the start the task's prompt) and `history` (every step with
    its observation), the planner's also `proposal`, a list of actions. In sequential order that is this turn's; in
    simultaneous order both are asked at once and the planner sees the proposal of the turn before, which is what
    Stronger-MAS's released code amounts to. `tool` names in PROPOSALS how a reply becomes the list: as it says itself
    (`actions`, role `game_tool`), or as its program prints (`program`, role `game_coder`).

    Local scores, as in Stronger-MAS: of the tool agent, the reward that its own proposal would have had; of the
    planner, the reward that its actions had.

    Raises:
        EnvError: the environment cannot preview.
    """
    problem = env.reset(task)
    if not isinstance(env, Previewing):
        raise EnvError(f"game_team: {type(env).__name__} cannot preview an action; name a game in env")
    state, history, earlier = task.prompt, "", ""

    async def propose(slots: dict[str, str]) -> str:
        idea = await team.act("tool", **slots)
        actions = await PROPOSALS[tool](idea, env)
        imagined = await env.preview(actions)
        team.score(idea.turn, local=imagined.reward)  # before anybody else is asked: a tree chooses by it
        return actions

    for _ in range(max_turns):
        slots = {"problem": problem, "state": state, "history": history}
        if order == "sequential":
            proposal = await propose(slots)
            plan = await team.act("planner", **slots, proposal=proposal)
        else:
            proposal, plan = await asyncio.gather(propose(slots), team.act("planner", **slots, proposal=earlier))
        step = await env.step(plan.value or "")
        team.score(plan.turn, local=step.reward)
        if step.done:
            return
        state, earlier = step.observation, proposal
        history += f"{plan.value or '(no actions)'}\n{step.observation}\n"
