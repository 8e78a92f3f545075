"""One agent alone, in any environment: the baseline of every team."""

from __future__ import annotations

from pydantic import PositiveInt

from rollout.base.tags import after_thought, last_tag
from rollout.environments.math import last_boxed
from rollout.environments.patches import BadPatch, parse_patch
from rollout.environments.protocol import Env
from rollout.orchestras.game_team import PROPOSALS, Tool, parse_decided
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_ASSISTANT = "You are a helpful and harmless assistant."

register_agent(
    "player",
    system=_ASSISTANT,
    user="""# Puzzle
{problem}

# What was done so far, and what came of it
{history}

# Now
{state}

Find actions that solve the puzzle from where it stands now, or else go as far towards it as you can see. Think first.
Then end with the actions on one line:
#### your actions""",
)(parse_decided)


@register_agent(
    "lone_solver",
    system=_ASSISTANT,
    user="{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}.",
)
def parse_boxed(text: str) -> str | None:
    """The whole text, which is what the environment `math` takes; None when its last box is missing or empty."""
    return text if last_boxed(text) else None


@register_agent(
    "lone_searcher",
    system="You answer questions with the help of a search engine.",
    user="""# Question
{problem}

# Searches so far
{history}

Think first. If a fact is missing, end with one query, short and specific: <search> your query </search>
Otherwise end with the answer alone, a name or a few words without explanation: <answer> your answer </answer>""",
)
def parse_step(text: str) -> str | None:
    """The last search or answer with its tags, which is what the environment `search` takes; the answer wins."""
    found = ((name, last_tag(text, name)) for name in ("answer", "search"))
    return next((f"<{name}> {content} </{name}>" for name, content in found if content), None)


@register_agent(
    "world_player",
    system=_ASSISTANT,
    user="""# Where you are
{problem}

# What you did so far, and what came of it
{history}

# Now
{state}

Think about what to do next. Then end with one action: <action> your action </action>""",
)
def parse_action(text: str) -> str | None:
    """What stands in the last `<action>` after any thought, which is what text worlds take."""
    return last_tag(after_thought(text), "action") or None


@register_agent(
    "tool_caller",
    system="You answer questions with the help of tools.",
    user="""# Question
{problem}

# Calls so far, and what they returned
{history}

Think first. Then end with one call or with the answer.""",
)
def parse_call(text: str) -> str | None:
    """The last call or answer with its tags, which is what the environment `mcp` takes; the answer wins."""
    text = after_thought(text)
    found = ((name, last_tag(text, name)) for name in ("answer", "call"))
    return next((f"<{name}>{content}</{name}>" for name, content in found if content), None)


@register_agent(
    "repairer",
    system="You are an expert programmer who repairs repositories.",
    user="""{problem}

# Your patches so far, and what came of them
{history}

Find out what is wrong. Then end with the patch, for the files as they are above.""",
)
def parse_repair(text: str) -> str | None:
    """The text after any thought, None when there is no patch in it."""
    try:
        parse_patch(text)
    except BadPatch:
        return None
    return after_thought(text)


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
