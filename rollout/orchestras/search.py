"""Teams with a search tool: Dr.MAS's search team, UnityMAS-O's question answering, M-ASK, one with memory.

A malformed query finds nothing and is counted by the environment; a malformed answer is scored as an empty one.
"""

import asyncio
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import Env, PlayedEnv, after_thought, last_tag
from rollout.orchestras.replies import END, NONE, Steps, read_plan
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
    """Play one question: at most `max_turns` turns, each a verdict and then a search or the answer, which ends it.

    The agents are named `verifier`, `searcher` and `answerer`. Their templates may use the slots `question` and
    `history` (every query with what it found, "" before the first), the searcher's also `verdict`, the verifier's full
    reply. In the last turn the answerer speaks whatever the verdict.

    Args:
        max_turns: turns, at most: each a verdict, then a search or the answer.
        malformed_verdict: what follows a malformed verdict: `search` fails closed, `answer` is what Dr.MAS's released
            code does.
    """
    question = env.reset(task)
    history = ""
    for turn in range(max_turns):
        verdict = await team.act("verifier", question=question, history=history)
        enough = malformed_verdict == "answer" if verdict.value is None else verdict.value == "yes"
        if enough or turn == max_turns - 1:
            await _answer(team, env, question=question, history=history)
            return
        query = await team.act("searcher", question=question, history=history, verdict=verdict.text)
        asked = f"<search> {query.value or ''} </search>"
        found = await env.step(asked)
        history += f"{asked}\n{found.observation}\n"


async def _answer(team: TeamSession, env: Env, **slots: object) -> None:
    """The end: the answerer's answer, an empty one where it is malformed."""
    answer = await team.act("answerer", **slots)
    await env.step(f"<answer> {answer.value or ''} </answer>")


async def search_parts(team: TeamSession, env: Env, question: str) -> list[tuple[str, str]]:
    """Let the decomposer split the question and the environment search for the parts, in their order.

    Returns:
        Each query with what it found. A malformed reply of the decomposer is one empty query, which the environment
        counts and which finds nothing.
    """
    reply = await team.act("decomposer", question=question)
    queries = (reply.value or "").split("\n")
    # one after another: side by side, the order of the trajectory's tool events would be the retriever's
    return [
        (query, (await env.step(f"<search> {query} </search>")).observation) for query in queries
    ]


async def qa_decompose(task: Task, team: TeamSession, env: Env) -> None:
    """Play one question: up to three queries at once, then the answer from all that they found.

    The agents are named `decomposer` and `answerer`. Their templates may use the slot `question`, the answerer's also
    `history`, every query with what it found.
    """
    question = env.reset(task)
    parts = await search_parts(team, env, question)
    history = "".join(f"<search> {query} </search>\n{found}\n" for query, found in parts)
    await _answer(team, env, question=question, history=history)


async def qa_evidence(
    task: Task, team: TeamSession, env: Env, *, read: Literal["each", "all"] = "each"
) -> None:
    """Play one question: up to three queries at once, the evidence of each, then the answer from the evidence.

    The agents are named `decomposer`, `extractor` and `answerer`. Templates may use the slot `question`, the
    extractor's also `query` and `information`, the answerer's also `history`, every query with its evidence. Nobody is
    asked to read a malformed decomposition; malformed evidence is empty.

    Args:
        read: `each`: the extractor reads the passages of each query alone; `all`: it reads the passages of all queries
            at once, as UnityMAS-O's summariser.
    """
    question = env.reset(task)

    async def extract(query: str, found: str) -> str:
        if not query:
            return ""
        reply = await team.act("extractor", question=question, query=query, information=found)
        return reply.value or ""

    parts = await search_parts(team, env, question)
    if read == "all":
        parts = [("\n".join(query for query, _ in parts), "\n\n".join(found for _, found in parts))]
    evidence = await asyncio.gather(*(extract(query, found) for query, found in parts))
    history = "".join(
        f"<search> {query} </search>\n<evidence> {known} </evidence>\n"
        for (query, _), known in zip(parts, evidence, strict=True)
    )
    await _answer(team, env, question=question, history=history)


def select(passages: tuple[str, ...], selection: str | None) -> list[str]:
    """The passages at the numbers of `selection`, counted from 1, in its order; numbers beyond the last choose none."""
    if selection is None or selection == NONE:
        return []
    return [
        passages[int(number) - 1] for number in selection.split(",") if int(number) <= len(passages)
    ]


async def qa_rewrite(task: Task, team: TeamSession, env: Env) -> None:
    """Play one question: one query, a selection of what it found, then the answer from the selection.

    The agents are named `rewriter`, `selector` and `answerer`. Templates may use the slot `question`, the selector's
    also `query` and `passages`, numbered from 1, the answerer's also `history`, the query with the selected passages.
    Where nothing was found the selector is not asked; a malformed selection keeps nothing.
    """
    question = env.reset(task)
    query = (await team.act("rewriter", question=question)).value or ""
    asked = f"<search> {query} </search>"
    passages = (await env.step(asked)).passages
    kept = ""
    if passages:
        numbered = "\n".join(
            f"{number}. {passage}" for number, passage in enumerate(passages, start=1)
        )
        choice = await team.act("selector", question=question, query=query, passages=numbered)
        kept = "\n".join(select(passages, choice.value))
    history = f"{asked}\n<information> {kept} </information>\n"
    await _answer(team, env, question=question, history=history)


NOTHING = "no useful information"


def shown_plan(plan: Steps) -> str:
    """A plan as agents read it, a step a line."""
    return "".join(
        f"t{number}: {question} | {answer}\n"
        for number, (question, answer) in enumerate(plan, start=1)
    )


def changed_plan(plan: Steps, change: str | None) -> Steps:
    """The plan after `change`, as `parse_change` gives it; itself when that is None or names no step of it."""
    if change is None:
        return plan
    kind, left, right = change.split("|")
    if kind == "add":
        return *plan, (left, right)
    place = int(left.removeprefix("t"))
    return tuple(
        (step[0], right) if number == place else step for number, step in enumerate(plan, start=1)
    )


async def m_ask(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 5
) -> None:
    """Play one question: a plan with an answer, then up to `max_turns` times search, summarise, update and answer.

    The agents are named `planner`, `searcher`, `summariser`, `updater` and `answerer`. Templates may use the slot
    `question`; all but the planner's also `plan`; the searcher's also `answer` and `queries`, the summariser's `query`
    and `information`, the updater's `query` and `evidence`, the answerer's `answer`. The latest answer is the team's.

    Every answer is scored as it is given, in the metrics of the environment and on the turn that gave it, the planner's
    too: `turn_difference` with `metric: token_f1` and `scored: [planner, answerer]` pays what each round added.

    The searcher ends the search, and so does its malformed query. A malformed plan is an empty one without an answer, a
    malformed report is no useful information, and a malformed update, or one of a step that is not there, changes
    nothing.

    Args:
        max_turns: searches, at most.
    """
    question = env.reset(task)

    async def measure(turn: int, answer: str) -> None:
        ahead = await env.preview(f"<answer> {answer} </answer>")
        team.score(turn, **ahead.metrics)

    first = await team.act("planner", question=question)
    plan, answer = read_plan(first.value or "") or ((), "")
    await measure(first.turn, answer)
    queries = ""
    for _ in range(max_turns):
        known = {"question": question, "plan": shown_plan(plan)}
        choice = await team.act("searcher", **known, answer=answer, queries=queries)
        query = choice.value
        if query is None or query == END:
            break
        queries += f"{query}\n"
        found = await env.step(f"<search> {query} </search>")
        report = await team.act("summariser", **known, query=query, information=found.observation)
        change = await team.act("updater", **known, query=query, evidence=report.value or NOTHING)
        plan = changed_plan(plan, change.value)
        reply = await team.act("answerer", question=question, plan=shown_plan(plan), answer=answer)
        answer = reply.value or ""
        await measure(reply.turn, answer)
    await env.step(f"<answer> {answer} </answer>")


async def memory_search(
    task: Task,
    team: TeamSession,
    env: Env,
    *,
    max_turns: PositiveInt = 4,
    max_calls: PositiveInt = 4,
) -> None:
    """Let `lead` ask `scout` what it wants to know, until it answers or `max_turns` questions are spent.

    Both hold one chat: the lead remembers every report, the scout what it searched for and found. Templates may use
    the slot `question`, the scout's also `wanted`, the lead's first question to it. A malformed report is passed on as
    it was said, without thoughts. A lead that is malformed ends the play without an answer.

    Args:
        max_turns: questions to the scout, at most.
        max_calls: replies of an agent in a row that may call tools.
    """
    question = env.reset(task)
    lead, scout = team.chat("lead"), team.chat("scout")
    reply = await lead.ask(question=question)
    for _ in range(max_turns):
        wanted = last_tag(reply.value or "", "search")
        if wanted is None or lead.full:
            break
        await (scout.say(wanted) if scout.latest else scout.ask(question=question, wanted=wanted))
        report = await scout.run(max_turns=max_calls)
        reply = await lead.say(report.value or after_thought(report.text))
    await env.step(f"<answer> {last_tag(reply.value or '', 'answer') or ''} </answer>")
