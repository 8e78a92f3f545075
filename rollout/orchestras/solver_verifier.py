"""Dr.MAS's math team: a solver and a verifier in turn, until the verifier approves or the loops are spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from rollout.base.tags import last_tag
from rollout.environments.math import last_boxed
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

VERDICTS = ("approve", "reject")
_ASSISTANT = "You are a helpful and harmless assistant."


@register_agent(
    "solver",
    system=_ASSISTANT,
    user=(
        "You are the solver in a team that solves math problems.\n\n"
        "Problem:\n{problem}\n\n{team_context}"
        "If the team has tried before, find out what was wrong and do better. Reason step by step, and put your final "
        "answer within \\boxed{{}}."
    ),
)
def parse_solution(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, None when there is none or it is empty."""
    return last_boxed(text) or None


@register_agent(
    "verifier",
    system=_ASSISTANT,
    user=(
        "You are the verifier in a team that solves math problems.\n\n"
        "Problem:\n{problem}\n\n{team_context}"
        "Check the solver's latest solution step by step. If it is complete and correct, end with "
        "<verify>approve</verify>. If not, say what is wrong and end with <verify>reject</verify>. "
        "Write the <verify> tag exactly once."
    ),
)
def parse_verdict(text: str) -> str | None:
    """`approve` or `reject`, None unless the text has exactly one such verdict in one pair of tags."""
    verdict = last_tag(text, "verify")
    once = text.count("<verify>") == text.count("</verify>") == 1
    return verdict if once and verdict in VERDICTS else None


def slots(problem: str, said: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The slots of both user templates, at rollout and in demonstrations alike.

    Args:
        problem: the problem as the environment states it.
        said: (agent, text) of everything said so far, oldest first.

    Returns:
        `problem`; `team_context`, all that was said, each text after its speaker's name and before a blank line,
        "" at the start; `solution`, the solver's latest text, "" at the start.
    """
    context = "".join(f"[{agent}]\n{text}\n\n" for agent, text in said)
    solution = next((text for agent, text in reversed(said) if agent == "solver"), "")
    return {"problem": problem, "team_context": context, "solution": solution}


async def solver_verifier(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_loops: PositiveInt = 2,
    malformed_verdict: Literal["approve", "reject"] = "reject",
) -> None:
    """Let the solver try up to `max_loops` times; its last text is the team's answer.

    The verifier speaks after every attempt but the last one possible, whose verdict could change nothing. A malformed
    verdict counts as `malformed_verdict`; Dr.MAS's released code approves.
    """
    problem = env.reset(task)
    said: list[tuple[str, str]] = []
    for attempt in range(1, max_loops + 1):
        solution = await team.act("solver", **slots(problem, said))
        said.append(("solver", solution.text))
        if attempt == max_loops:
            break
        verdict = await team.act("verifier", **slots(problem, said))
        said.append(("verifier", verdict.text))
        if (verdict.value or malformed_verdict) == "approve":
            break
    await env.step(solution.text)
