"""Adaptive branching tree search by one or several agents, as MARTI's MARS2 samples it: widen or refine (AB-MCTS)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, Protocol

from rollout.agent import register_agent
from rollout.envs.code import last_program
from rollout.envs.math import last_boxed
from rollout.envs.protocol import Env, EnvError, Previewing
from rollout.orchestras.coder_tester import fenced
from rollout.records import Task
from rollout.tags import after_thought
from rollout.team import Seat
from rollout.thompson import PRIORS, Node, Search

_ATTEMPT = """# Problem
{problem}

# An earlier attempt
{attempt}

# What came of it
{feedback}

# What to do
"""


@register_agent(
    "tree_coder",
    system="You are an expert programmer.",
    user=_ATTEMPT
    + """If there is an attempt above, find out what is wrong with it and mend it, or write a better one from scratch.
If there is none, solve the problem. Put the whole program into one block fenced by ```python and ```.""",
)
def parse_program(text: str) -> str | None:
    """The last program in its fence, which is what the environment `code` takes; None without one."""
    return fenced(last_program(text)) or None


@register_agent(
    "tree_solver",
    system="You are a careful problem solver.",
    user=_ATTEMPT
    + """If there is an attempt above, go through it step by step and mend it. If there is none, solve the problem.
Reason step by step, and put your final answer within \\boxed{{}}.""",
)
def parse_solution(text: str) -> str | None:
    """The text after any thought, which is what the environment `math` takes; None when its last box is missing."""
    text = after_thought(text)
    return text if last_boxed(text) else None


class GradedEnv(Env, Previewing, Protocol):
    """A world in which actions can be graded without being taken."""


async def ab_mcts(
    task: Task,
    team: Seat,
    env: GradedEnv,
    *,
    agents: Sequence[str] = ("generator",),
    max_nodes: int = 8,
    posterior: Literal["gaussian", "beta"] = "gaussian",
    measure: str = "reward",
    malformed: float = 0.0,
    stop_at: float | None = None,
) -> None:
    """Grow a tree of `max_nodes` attempts by Thompson sampling, and take the best one as the action.

    Each attempt starts from the problem alone or mends an earlier one (`rollout.thompson`); whichever of `agents`
    promises most makes it. Templates may use the slots `problem`, `attempt`, the text that is to be mended without its
    thoughts, and `feedback`, what the environment answered to it; both are "" at the root. What its parser makes of a
    reply is the action. `measure` is what an action is graded by, in `preview`: its `reward`, or the metric of that
    name. Rewards and most metrics know the truth, so the best node is an oracle's choice; in the environment `code` the
    metric `visible_rate` does not, and its feedback is what the visible tests say.

    A turn's `node` is its place in the tree, its scores `local` and `branch` its grade. A malformed reply has the grade
    `malformed`, and its text may be mended like any other. The best node, the first of equals, is stepped with, and the
    trajectory's leaf; "" is, where every reply was malformed. A node of at least `stop_at` ends the search.

    Raises:
        ValueError: an option is out of range, or the trajectory is sampled as a tree already.
        EnvError: the environment cannot preview, or does not measure `measure`.
    """
    if max_nodes < 1 or not agents:
        raise ValueError(f"ab_mcts: {len(agents)} agents and max_nodes {max_nodes}; expected at least 1 of each")
    if posterior not in PRIORS:
        raise ValueError(f"ab_mcts: posterior is '{posterior}'; expected one of {', '.join(PRIORS)}")
    problem = env.reset(task)
    search = Search(agents, PRIORS[posterior]())
    attempts: dict[str, tuple[str, str]] = {"": ("", "")}  # text and feedback, by node
    best: tuple[Node, str] | None = None  # and its action
    for number in range(max_nodes):
        parent, agent = search.select(Random(team.seed("node", number)))
        attempt, feedback = attempts[parent.name]
        reply = await team.act(agent, problem=problem, attempt=attempt, feedback=feedback)
        grade, answer = malformed, "It could not be read: it is not of the form that was asked for."
        if reply.value is not None:
            grade, answer = await _grade(env, reply.value, measure)
        try:
            node = search.add(parent, agent, grade)
        except ValueError as error:
            raise EnvError(f"ab_mcts: {error}") from error
        team.place(reply.turn, node.name)
        team.score(reply.turn, local=grade, branch=grade)
        attempts[node.name] = after_thought(reply.text), answer
        if reply.value is not None and (best is None or grade > best[0].score):
            best = node, reply.value
        if stop_at is not None and grade >= stop_at:
            break
    team.leaf = best[0].name if best else ""
    await env.step(best[1] if best else "")


async def _grade(env: Previewing, action: str, measure: str) -> tuple[float, str]:
    """How good an action is, and what the environment says to it."""
    step = await env.preview(f"<run>\n{action}\n</run>" if measure == "visible_rate" else action)
    if measure == "reward":
        return step.reward, step.observation
    if measure not in step.metrics:
        raise EnvError(f"ab_mcts: the environment does not measure '{measure}'; it measures {', '.join(step.metrics)}")
    return step.metrics[measure], step.observation
