"""UnityMAS-O's decomposition and evidence teams: sub-questions are searched, read or extracted, and answered."""

from __future__ import annotations

import asyncio

from rollout.base.tags import last_tag
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

MAX_QUERIES = 3


@register_agent(
    "decomposer",
    system="You are a member of a team that answers questions with the help of a search engine.",
    user="""# Question
{question}

# Your role
You are the decomposer. Split the question into the single facts that it asks for. All queries are sent to the search
engine at once, so none may depend on what another finds. Think first. Then end with one to three queries, short and
specific, one on each line:
<queries>
your first query
your second query
</queries>""",
)
def parse_queries(text: str) -> str | None:
    """The lines of the last `<queries>` tag; None unless they are one to three different ones without tags."""
    block = last_tag(text, "queries") or ""
    queries = [line.strip() for line in block.splitlines() if line.strip()]
    different = len(set(queries)) == len(queries) and 1 <= len(queries) <= MAX_QUERIES
    return "\n".join(queries) if different and not set("<>") & set(block) else None


async def search_parts(team: TeamSession, env: Env, question: str) -> list[tuple[str, str]]:
    """Let the decomposer split the question and the environment search for the parts, in their order.

    Returns:
        Each query with what it found. A malformed reply of the decomposer is one empty query, which the environment
        counts and which finds nothing.
    """
    reply = await team.act("decomposer", question=question)
    queries = (reply.value or "").split("\n")
    # one after another: side by side, the order of the trajectory's tool events would be the retriever's
    return [(query, (await env.step(f"<search> {query} </search>")).observation) for query in queries]


async def qa_decompose(task: Task, team: TeamSession, env: Env) -> None:
    """Play one question: up to three queries at once, then the answer from all that they found.

    The agents are named `decomposer` and `answerer`. Their templates may use the slot `question`, the answerer's also
    `history`, every query with what it found. A malformed decomposition finds nothing; a malformed answer is scored as
    an empty one.
    """
    question = env.reset(task)
    parts = await search_parts(team, env, question)
    history = "".join(f"<search> {query} </search>\n{found}\n" for query, found in parts)
    answer = await team.act("answerer", question=question, history=history)
    await env.step(f"<answer> {answer.value or ''} </answer>")


@register_agent(
    "extractor",
    system="You are a member of a team that answers questions with the help of a search engine.",
    user="""# Question
{question}

# One of the searches made for it
{query}

# What this search found
{information}

# Your role
You are the extractor. The answerer will not see the passages above, only what you report of them. Report what they say
about the search, in one or two sentences and with the names and numbers that matter; add nothing that they do not say.
Think first. Then end with your report: <evidence> your report </evidence>""",
)
def parse_evidence(text: str) -> str | None:
    """The content of the last `<evidence>` tag, None when it is missing or empty."""
    return last_tag(text, "evidence") or None


async def qa_evidence(task: Task, team: TeamSession, env: Env) -> None:
    """Play one question: up to three queries at once, the evidence of each, then the answer from the evidence.

    The agents are named `decomposer`, `extractor` and `answerer`. The extractor is asked once for each query, for all
    of them side by side. Templates may use the slot `question`, the extractor's also `query` and `information`, the
    answerer's also `history`, every query with its evidence. A malformed decomposition finds nothing and nobody is
    asked to read it; malformed evidence is empty; a malformed answer is scored as an empty one.
    """
    question = env.reset(task)

    async def extract(query: str, found: str) -> str:
        if not query:
            return ""
        reply = await team.act("extractor", question=question, query=query, information=found)
        return reply.value or ""

    parts = await search_parts(team, env, question)
    evidence = await asyncio.gather(*(extract(query, found) for query, found in parts))
    history = "".join(
        f"<search> {query} </search>\n<evidence> {known} </evidence>\n"
        for (query, _), known in zip(parts, evidence, strict=True)
    )
    answer = await team.act("answerer", question=question, history=history)
    await env.step(f"<answer> {answer.value or ''} </answer>")
