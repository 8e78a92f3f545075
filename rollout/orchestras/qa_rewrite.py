"""UnityMAS-O's rewriting team: a rewriter asks, a selector keeps the passages that help, an answerer reads those."""

from __future__ import annotations

import re

from rollout.base.tags import last_tag
from rollout.environments.protocol import Env
from rollout.orchestras.search_team import parse_query
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_SYSTEM = "You are a member of a team that answers questions with the help of a search engine."
_NONE = "none"
_NUMBERS = re.compile(r"[1-9][0-9]*( *, *[1-9][0-9]*)*")

register_agent(
    "rewriter",
    system=_SYSTEM,
    user="""# Question
{question}

# Your role
You are the rewriter. A search engine finds passages by likeness of meaning. Turn the question into the query that finds
the passage with its answer: name what is asked for, leave out what does not help the search. Think first. Then end
with exactly one query: <search> your query </search>""",
)(parse_query)


@register_agent(
    "selector",
    system=_SYSTEM,
    user="""# Question
{question}

# What a search for "{query}" found
{passages}

# Your role
You are the selector. The answerer will see only the passages that you keep. Keep those that help to answer the
question, and no others. Think first. Then end with their numbers, for example <select> 1, 3 </select>, or with
<select> none </select> when no passage helps.""",
)
def parse_selection(text: str) -> str | None:
    """Different positive numbers with commas between, or "none", from the last `<select>` tag; None for others."""
    chosen = (last_tag(text, "select") or "").lower()
    if chosen == _NONE:
        return _NONE
    numbers = [number.strip() for number in chosen.split(",")]
    return ",".join(numbers) if _NUMBERS.fullmatch(chosen) and len(set(numbers)) == len(numbers) else None


def select(passages: tuple[str, ...], selection: str | None) -> list[str]:
    """The passages at the numbers of `selection`, counted from 1, in its order; numbers beyond the last choose none."""
    if selection is None or selection == _NONE:
        return []
    return [passages[int(number) - 1] for number in selection.split(",") if int(number) <= len(passages)]


async def qa_rewrite(task: Task, team: TeamSession, env: Env) -> None:
    """Play one question: one query, a selection of what it found, then the answer from the selection.

    The agents are named `rewriter`, `selector` and `answerer`. Templates may use the slot `question`, the selector's
    also `query` and `passages`, numbered from 1, the answerer's also `history`, the query with the selected passages.
    A malformed query leaves an empty note and is counted by the environment; where nothing was found the selector is
    not asked. A malformed selection keeps nothing; a malformed answer is scored as an empty one.
    """
    question = env.reset(task)
    query = (await team.act("rewriter", question=question)).value or ""
    asked = f"<search> {query} </search>"
    passages = (await env.step(asked)).passages
    kept = ""
    if passages:
        numbered = "\n".join(f"{number}. {passage}" for number, passage in enumerate(passages, start=1))
        choice = await team.act("selector", question=question, query=query, passages=numbered)
        kept = "\n".join(select(passages, choice.value))
    history = f"{asked}\n<information> {kept} </information>\n"
    answer = await team.act("answerer", question=question, history=history)
    await env.step(f"<answer> {answer.value or ''} </answer>")
