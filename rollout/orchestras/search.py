"""Orchestras that answer questions with the help of a search engine.

`search_team` is Dr.MAS's; `qa_decompose`, `qa_evidence` and `qa_rewrite` are UnityMAS-O's; in
`memory_search` each of two agents keeps a chat of its own. A malformed query finds nothing, and the
environment counts it; a malformed answer is scored as an empty one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import Env, after_thought, last_tag
from rollout.orchestras.replies import NO_PASSAGE
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


async def search_team(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_turns: PositiveInt = 4,
    malformed_verdict: Literal["search", "answer"] = "search",
) -> None:
    """Let `verifier` decide in each round whether `searcher` searches or `answerer` answers.

    The answer ends the task. In the last round the answerer is asked whatever the verdict. Templates
    may use the slots `question` and `history`, every query with its passages, at first ""; that of
    the searcher also `verdict`, the whole reply of the verifier.

    Args:
        max_turns: maximum number of rounds; each is a verdict, then a search or the answer.
        malformed_verdict: step that follows a malformed verdict, a search or the answer; `answer`
            as in Dr.MAS's released code.
    """
    question = env.reset(task)
    history = ""
    for turn in range(1, max_turns + 1):
        verdict = await team.act("verifier", question=question, history=history)
        if verdict.value == "yes" or turn == max_turns:
            break
        if verdict.value is None and malformed_verdict == "answer":
            break
        query = await team.act("searcher", question=question, history=history, verdict=verdict.text)
        result = await _search(env, query.value or "")
        history += result.as_history()
    await _answer(team, env, question=question, history=history)


async def _answer(team: TeamSession, env: Env, *, question: str, history: str) -> None:
    """Ask `answerer` and end the task with its answer; "" if the reply is malformed."""
    reply = await team.act("answerer", question=question, history=history)
    await env.step(f"<answer> {reply.value or ''} </answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchResult:
    """A query with its passages."""

    query: str
    observation: str  # passages as the environment shows them
    passages: tuple[str, ...] = ()

    def as_history(self) -> str:
        """Return the query with its observation, as agents read them."""
        return f"<search> {self.query} </search>\n{self.observation}\n"


async def _search(env: Env, query: str) -> _SearchResult:
    step = await env.step(f"<search> {query} </search>")
    return _SearchResult(query=query, observation=step.observation, passages=step.passages)


async def _search_parts(team: TeamSession, env: Env, question: str) -> list[_SearchResult]:
    """Ask `decomposer` to split the question into queries, and search for each.

    A malformed reply counts as one empty query.
    """
    reply = await team.act("decomposer", question=question)
    results = []
    # The searches are made one after the other, so that the order of the trajectory's tool calls
    # does not depend on the speed of the retriever.
    for query in (reply.value or "").split("\n"):
        results.append(await _search(env, query))
    return results


async def qa_decompose(task: Task, team: TeamSession, env: Env) -> None:
    """Ask `decomposer` for up to three queries, then `answerer`, who reads their passages.

    Templates may use the slot `question`; that of the answerer also `history`, every query with its
    passages.
    """
    question = env.reset(task)
    results = await _search_parts(team, env, question)
    history = "".join(result.as_history() for result in results)
    await _answer(team, env, question=question, history=history)


async def qa_evidence(
    task: Task, team: TeamSession, env: Env, *, read: Literal["each", "all"] = "each"
) -> None:
    """Ask `decomposer` for queries, `extractor` for evidence in their passages, then `answerer`.

    Templates may use the slot `question`; that of the extractor also `query` and `information`, the
    passages of the query; that of the answerer also `history`, every query with its evidence. The
    extractor is not asked if the decomposer's reply is malformed; malformed evidence is "".

    Args:
        read: `each`: the extractor is asked for each query; `all`: it is asked once and reads the
            passages of all queries, as UnityMAS-O's summariser does.
    """
    question = env.reset(task)

    async def extract(result: _SearchResult) -> str:
        if not result.query:
            return ""
        reply = await team.act(
            "extractor", question=question, query=result.query, information=result.observation
        )
        return reply.value or ""

    results = await _search_parts(team, env, question)
    if read == "all":
        merged = _SearchResult(
            query="\n".join(result.query for result in results),
            observation="\n\n".join(result.observation for result in results),
        )
        results = [merged]
    evidence = await asyncio.gather(*(extract(result) for result in results))
    history = ""
    for result, text in zip(results, evidence, strict=True):
        history += f"<search> {result.query} </search>\n<evidence> {text} </evidence>\n"
    await _answer(team, env, question=question, history=history)


def select_passages(passages: Sequence[str], selection: str | None) -> list[str]:
    """Return the selected passages in the order of the selection.

    Args:
        passages: passages that a query found.
        selection: numbers of passages, from 1 and separated by commas, or "none"; None if the
            selector's reply is malformed. Numbers above the number of passages select none.
    """
    if selection is None or selection == NO_PASSAGE:
        return []
    numbers = [int(number) for number in selection.split(",")]
    return [passages[number - 1] for number in numbers if number <= len(passages)]


async def qa_rewrite(task: Task, team: TeamSession, env: Env) -> None:
    """Ask `rewriter` for a query, `selector` for the useful passages, then `answerer`.

    Templates may use the slot `question`; that of the selector also `query` and `passages`, which
    are numbered from 1; that of the answerer also `history`, the query with the selected passages.
    The selector is not asked if nothing was found; a malformed selection selects nothing.
    """
    question = env.reset(task)
    rewritten = await team.act("rewriter", question=question)
    result = await _search(env, rewritten.value or "")

    selected = []
    if result.passages:
        numbered_passages = "\n".join(
            f"{number}. {passage}" for number, passage in enumerate(result.passages, start=1)
        )
        selection = await team.act(
            "selector", question=question, query=result.query, passages=numbered_passages
        )
        selected = select_passages(result.passages, selection.value)

    information = "\n".join(selected)
    history = f"<search> {result.query} </search>\n<information> {information} </information>\n"
    await _answer(team, env, question=question, history=history)


async def memory_search(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_turns: PositiveInt = 4,
    max_calls: PositiveInt = 4,
) -> None:
    """Let `lead` put requests to `scout`, who searches with a tool, until the lead answers.

    Each agent keeps its own chat for the whole task: the lead's contains every report, the scout's
    its searches and their passages. Templates may use the slot `question`; that of the scout also
    `wanted`, the lead's first request. A malformed report is passed on without its thought. A
    malformed reply of the lead ends the task without an answer.

    Args:
        max_turns: maximum number of requests of the lead to the scout.
        max_calls: for each request, maximum number of the scout's replies that call tools; its next
            reply is the report, and calls in it are not made.
    """
    question = env.reset(task)
    lead = team.chat("lead")
    scout = team.chat("scout")
    reply = await lead.ask(question=question)
    for _ in range(max_turns):
        wanted = last_tag(reply.value or "", "search")
        if wanted is None or lead.full:
            break
        if scout.latest is None:
            await scout.ask(question=question, wanted=wanted)
        else:
            await scout.say(wanted)
        report = await scout.run(max_turns=max_calls)
        reply = await lead.say(report.value or after_thought(report.text))
    answer = last_tag(reply.value or "", "answer") or ""
    await env.step(f"<answer> {answer} </answer>")
