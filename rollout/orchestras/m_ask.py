"""Orchestra `m_ask`: a plan with an answer, improved search by search (M-ASK, UnityMAS-O)."""

from dataclasses import replace

from pydantic import PositiveInt

from rollout.environments.protocol import PlayedEnv
from rollout.orchestras.replies import END_OF_SEARCH, Plan, PlanStep, read_plan
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession

_NO_EVIDENCE = "no useful information"


def format_plan(plan: Plan) -> str:
    """Return a plan as agents read it, with a line for each step."""
    lines = [
        f"t{number}: {step.question} | {step.answer}\n" for number, step in enumerate(plan, start=1)
    ]
    return "".join(lines)


def change_plan(plan: Plan, change: str | None) -> Plan:
    """Apply a change, such as `update|t1|answer` or `add|question|answer`, to a plan; return the new plan.

    The plan stays the same if the change is None or updates a step that does not exist.
    """
    if change is None:
        return plan
    kind, subject, answer = change.split("|")
    if kind == "add":
        return (*plan, PlanStep(question=subject, answer=answer))
    updated_number = int(subject.removeprefix("t"))
    steps = []
    for number, step in enumerate(plan, start=1):
        steps.append(replace(step, answer=answer) if number == updated_number else step)
    return tuple(steps)


async def m_ask(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 5
) -> None:
    """Ask `planner` for a plan and an answer, and improve both by searches; the last answer is final.

    In each round `searcher` states a query or ends the search, `summariser` reports on the query's
    passages, `updater` changes a step of the plan, and `answerer` answers. Templates may use the
    slot `question`; all but the planner's also `plan`; that of the searcher also `answer` and
    `queries`, that of the summariser `query` and `information`, that of the updater `query` and
    `evidence`, and that of the answerer `answer`.

    The turns of planner and answerer are scored with the environment's metrics for their answer.
    The reward `turn_difference` with `metric: token_f1` and `scored: [planner, answerer]` pays each
    round the change in the metric.

    A malformed reply of the searcher ends the search. A malformed plan is empty and has no answer,
    a malformed report reads "no useful information", a malformed answer is "", and a malformed update,
    or an update of a step that does not exist, changes nothing.

    Args:
        max_turns: maximum number of rounds; each has one search.
    """
    question = env.reset(task)

    async def score_answer(turn: int, answer: str) -> None:
        step = await env.preview(f"<answer> {answer} </answer>")
        team.score(turn, **step.metrics)

    first = await team.act("planner", question=question)
    plan: Plan = ()
    answer = ""
    planned = read_plan(first.value or "")
    if planned is not None:
        plan, answer = planned
    await score_answer(first.turn, answer)

    queries = ""
    for _ in range(max_turns):
        slots = {"question": question, "plan": format_plan(plan)}
        choice = await team.act("searcher", **slots, answer=answer, queries=queries)
        query = choice.value
        if query is None or query == END_OF_SEARCH:
            break
        queries += f"{query}\n"

        step = await env.step(f"<search> {query} </search>")
        report = await team.act("summariser", **slots, query=query, information=step.observation)
        evidence = report.value or _NO_EVIDENCE
        change = await team.act("updater", **slots, query=query, evidence=evidence)
        plan = change_plan(plan, change.value)
        reply = await team.act("answerer", question=question, plan=format_plan(plan), answer=answer)
        answer = reply.value or ""
        await score_answer(reply.turn, answer)
    await env.step(f"<answer> {answer} </answer>")
