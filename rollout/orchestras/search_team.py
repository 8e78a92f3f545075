"""The Dr.MAS search team: a verifier routes every turn to a searcher or to the answerer."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from rollout.base.tags import last_tag
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_SYSTEM = "You are a member of a team that answers questions with the help of a search engine."


@register_agent(
    "search_verifier",
    system=_SYSTEM,
    user="""# Question
{question}

# Searches so far
{history}

# Your role
You are the verifier. Judge the searches above, each in <search> </search> with what it found in <information>
</information>: were they precise, did they serve the question, and is what they found enough to answer it with
certainty? Think first. Then end with exactly one verdict:
<verify>yes</verify> when the information is sufficient: the answerer will answer now;
<verify>no</verify> when it is not: the searcher will search once more.""",
)
def parse_verdict(text: str) -> str | None:
    """ "yes" or "no" from the last `<verify>` tag, None when it holds anything else."""
    verdict = (last_tag(text, "verify") or "").lower()
    return verdict if verdict in ("yes", "no") else None


@register_agent(
    "searcher",
    system=_SYSTEM,
    user="""# Question
{question}

# Searches so far
{history}

# The verifier's view
{verdict}

# Your role
You are the searcher. Decide which single fact is missing and how to find it. Think first. Then end with exactly one
query, short and specific, and not one that was asked before: <search> your query </search>""",
)
def parse_query(text: str) -> str | None:
    """The query in the last `<search>` tag; None when it is missing, empty or holds another tag."""
    query = last_tag(text, "search")
    return query if query and not set("<>") & set(query) else None


@register_agent(
    "answerer",
    system=_SYSTEM,
    user="""# Question
{question}

# Searches so far
{history}

# Your role
You are the answerer. Answer the question from the information above. Think first. Then end with the answer alone,
a name or a few words without explanation: <answer> your answer </answer>""",
)
def parse_answer(text: str) -> str | None:
    """The content of the last `<answer>` tag, None when it is missing or empty."""
    return last_tag(text, "answer") or None


async def search_team(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_turns: PositiveInt = 4,
    malformed_verdict: Literal["search", "answer"] = "search",
) -> None:
    """Play one question: at most `max_turns` turns, each a verdict and then a search or the answer, which ends it.

    The agents are named `verifier`, `searcher` and `answerer`. Their templates may use the slots `question` and
    `history` (every query with what it found, "" before the first), the searcher's also `verdict`, the verifier's full
    reply. In the last turn the answerer speaks whatever the verdict. A malformed verdict searches on, which fails
    closed; "answer" is what Dr.MAS's released code does. A malformed query leaves an empty information note in the
    history and is counted by the environment; a malformed answer is scored as an empty one.
    """
    question = env.reset(task)
    history = ""
    for turn in range(max_turns):
        verdict = await team.act("verifier", question=question, history=history)
        enough = malformed_verdict == "answer" if verdict.value is None else verdict.value == "yes"
        if enough or turn == max_turns - 1:
            answer = await team.act("answerer", question=question, history=history)
            await env.step(f"<answer> {answer.value or ''} </answer>")
            return
        query = await team.act("searcher", question=question, history=history, verdict=verdict.text)
        asked = f"<search> {query.value or ''} </search>"
        found = await env.step(asked)
        history += f"{asked}\n{found.observation}\n"
