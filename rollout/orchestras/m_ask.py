"""M-ASK: a plan with an answer that searches improve step by step (arXiv 2605.26646, UnityMAS-O's search team)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import PositiveInt

from rollout.base.errors import EnvError
from rollout.base.tags import last_tag
from rollout.environments.protocol import Env, Previewing
from rollout.orchestras.search_team import parse_answer
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent


async def m_ask(task: Task, team: TeamSession, env: Env, *, max_turns: PositiveInt = 5) -> None:
    """Play one question: a plan with an answer, then up to `max_turns` times search, summarise, update and answer.

    The agents are named `planner`, `searcher`, `summariser`, `updater` and `answerer`. Templates may use the slot
    `question`; all but the planner's also `plan`; the searcher's also `answer` and `queries`, the summariser's `query`
    and `information`, the updater's `query` and `evidence`, the answerer's `answer`. The latest answer is the team's.

    Every answer is scored as it is given, in the metrics of the environment and on the turn that gave it, the planner's
    too: `turn_difference` with `metric: token_f1` and `scored: [planner, answerer]` pays what each round added.

    The searcher ends the search, and a malformed query ends it too. A malformed plan is an empty one without an answer,
    a malformed report is no useful information, a malformed update, or one of a step that is not there, changes
    nothing, and a malformed answer is an empty one.

    Raises:
        EnvError: the environment cannot preview.
    """
    question = env.reset(task)
    if not isinstance(env, Previewing):
        raise EnvError(f"m_ask: {type(env).__name__} cannot preview an answer; name search in env")

    async def measure(turn: int, answer: str) -> None:
        ahead = await env.preview(f"<answer> {answer} </answer>")
        team.score(turn, **ahead.metrics)

    first = await team.act("planner", question=question)
    plan, answer = (read_plan(first.value) if first.value is not None else None) or (Plan(), "")
    await measure(first.turn, answer)
    queries = ""
    for _ in range(max_turns):
        known = {"question": question, "plan": str(plan)}
        choice = await team.act("searcher", **known, answer=answer, queries=queries)
        query = choice.value
        if query is None or query == END:
            break
        queries += f"{query}\n"
        found = await env.step(f"<search> {query} </search>")
        report = await team.act("summariser", **known, query=query, information=found.observation)
        change = await team.act("updater", **known, query=query, evidence=report.value or NOTHING)
        plan = plan.changed(change.value)
        reply = await team.act("answerer", question=question, plan=str(plan), answer=answer)
        answer = reply.value or ""
        await measure(reply.turn, answer)
    await env.step(f"<answer> {answer} </answer>")


END = "<end>"
NOTHING = "no useful information"
MAX_STEPS = 5  # of a plan as the planner writes it
_SYSTEM = "You are a member of a team that answers questions by a plan, with the help of a search engine."
_STATE = """# Question
{question}

# Plan: sub-questions and what is believed of them
{plan}
"""


def _fields(line: str) -> tuple[str, str] | None:
    """The two sides of `left | right`, None unless both are there and hold no tag."""
    left, bar, right = (part.strip() for part in line.partition("|"))
    return (left, right) if bar and left and right and not set("|<>") & set(left + right) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """Sub-questions with what the team believes of each."""

    steps: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "".join(f"t{number}: {question} | {answer}\n" for number, (question, answer) in enumerate(self.steps, 1))

    def changed(self, change: str | None) -> Plan:
        """The plan after `change`, as `parse_change` gives it; itself when that is None or names no step of it."""
        if change is None:
            return self
        kind, left, right = change.split("|")
        if kind == "add":
            return Plan((*self.steps, (left, right)))
        steps = list(self.steps)
        index = int(left.removeprefix("t")) - 1
        if index < len(steps):
            steps[index] = (steps[index][0], right)
        return Plan(tuple(steps))


@register_agent(
    "ask_planner",
    system=_SYSTEM,
    user="""# Question
{question}

# Your role
You are the planner. Before anything is searched, split the question into one to five sub-questions, simple ones first,
and write what you believe is the answer of each, or unknown. Then answer the question itself as well as you can now.
Think first. Then end with the plan, one sub-question on each line, and with the answer alone, a few words:
<plan>
your sub-question | its answer
</plan>
<answer> your answer </answer>""",
)
def parse_plan(text: str) -> str | None:
    """The text itself, for `read_plan`; None unless it holds a plan and an answer."""
    return text if read_plan(text) else None


def read_plan(text: str) -> tuple[Plan, str] | None:
    """The last `<plan>`, of one to five lines `sub-question | answer`, and the last `<answer>`; None if malformed."""
    lines = [line for line in (last_tag(text, "plan") or "").splitlines() if line.strip()]
    steps = [fields for line in lines if (fields := _fields(line))]
    answer = parse_answer(text)
    well_formed = answer and len(steps) == len(lines) and 1 <= len(steps) <= MAX_STEPS
    return (Plan(tuple(steps)), answer) if answer and well_formed else None


@register_agent(
    "ask_searcher",
    system=_SYSTEM,
    user=_STATE
    + """
# Answer so far
{answer}

# Queries so far
{queries}

# Your role
You are the searcher. Decide which fact would most improve the answer. Think first. Then end with exactly one of these:
a query, short and specific, and not one that was asked before: <search> your query </search>
or, when the answer is certain or nothing more can be found: <end>""",
)
def parse_search(text: str) -> str | None:
    """The query in the last `<search>` tag, or "<end>"; None for both, neither, or a query that holds a tag."""
    query = last_tag(text, "search")
    if END in text:
        return END if query is None else None
    return query if query and not set("<>") & set(query) else None


@register_agent(
    "ask_summariser",
    system=_SYSTEM,
    user=_STATE
    + """
# What a search for "{query}" found
{information}

# Your role
You are the summariser. The others will not see the passages above, only what you report of them. Report in one or two
sentences what they say that helps with the plan, and add nothing that they do not say. Think first. Then end with your
report, or with the words no useful information: <evidence> your report </evidence>""",
)
def parse_report(text: str) -> str | None:
    """The content of the last `<evidence>` tag, None when it is missing or empty."""
    return last_tag(text, "evidence") or None


@register_agent(
    "ask_updater",
    system=_SYSTEM,
    user=_STATE
    + """
# What a search for "{query}" brought
{evidence}

# Your role
You are the updater. Bring the plan up to date with exactly one change. Think first. Then end with it:
a better answer of a step, by its number: <update> t1 | the answer </update>
or a new step: <add> your sub-question | its answer </add>""",
)
def parse_change(text: str) -> str | None:
    """`update|t1|answer` or `add|sub-question|answer`; None unless the text makes exactly one such change."""
    found = {kind: content for kind in ("update", "add") if (content := last_tag(text, kind)) is not None}
    if len(found) != 1:
        return None
    ((kind, content),) = found.items()
    fields = _fields(content)
    if fields is None or "\n" in content or (kind == "update" and not re.fullmatch("t[1-9][0-9]{0,2}", fields[0])):
        return None
    return f"{kind}|{fields[0]}|{fields[1]}"


register_agent(
    "ask_answerer",
    system=_SYSTEM,
    user=_STATE
    + """
# Answer so far
{answer}

# Your role
You are the answerer. Answer the question from the plan as it stands now; keep the answer so far when nothing speaks
against it. Think first. Then end with the answer alone, a name or a few words without explanation:
<answer> your answer </answer>""",
)(parse_answer)
