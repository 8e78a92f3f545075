"""Orchestras whose agents speak one after the other.

`solver_verifier` is Dr.MAS's, `chain` MARTI's, `math_refine` UnityMAS-O's and `mathchat` MAPPA's.
In all but the first, agents see the others' replies without the thoughts, and a malformed last reply
leaves the team without an answer. Malformed replies are shown as they are, except a review in
`math_refine` and a program in `mathchat`.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import Env, PlayedEnv, after_thought
from rollout.orchestras.answers import (
    ask_for_answer,
    boxed,
    grade,
    grade_action,
    score_verdict,
)
from rollout.orchestras.replies import with_output
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


def solver_verifier_slots(problem: str, replies: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the slots of the user templates of solver and verifier.

    The demonstrations of `arithmetic` use them, too.

    Args:
        problem: problem as the environment states it.
        replies: (agent, text) of every reply so far, oldest first.

    Returns:
        `problem`; `team_context`, every reply after its agent's name and before a blank line, at
        first ""; `solution`, the latest reply of the solver, at first "".
    """
    context = "".join([f"[{agent}]\n{text}\n\n" for agent, text in replies])
    solution = next((text for agent, text in reversed(replies) if agent == "solver"), "")
    return {"problem": problem, "team_context": context, "solution": solution}


async def solver_verifier(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_loops: PositiveInt = 2,
    malformed_verdict: Literal["approve", "reject"] = "reject",
    local_scores: bool = False,
) -> None:
    """Let the solver try until the verifier approves; the solver's last reply is the team's answer.

    The verifier is not asked after attempt `max_loops`, because its verdict would change nothing.

    Args:
        max_loops: maximum number of attempts of the solver.
        malformed_verdict: verdict that a malformed reply of the verifier counts as.
        local_scores: every reply has a local score, which AT-GRPO compares: that of the solver is
            the reward of its answer, and that of the verifier is 1 if its verdict is right, else 0.
    """
    problem = env.reset(task)
    replies: list[tuple[str, str]] = []
    for attempt in range(1, max_loops + 1):
        solution = await team.act("solver", **solver_verifier_slots(problem, replies))
        replies.append(("solver", solution.text))
        answer_score: float | None = None
        if local_scores:
            answer_score = await grade_action(team, env, solution.turn, solution.text)
        if attempt == max_loops:
            break
        verdict = await team.act("verifier", **solver_verifier_slots(problem, replies))
        replies.append(("verifier", verdict.text))
        if local_scores:
            says_right = {"approve": True, "reject": False}.get(verdict.value or "")
            score_verdict(team, verdict.turn, answer_score, says_right=says_right)
        if (verdict.value or malformed_verdict) == "approve":
            break
    await env.step(solution.text)


async def chain(task: Task, team: TeamSession, env: PlayedEnv) -> None:
    """Ask `generator`, `verifier` and `refiner` in this order; the refiner's answer is final.

    Templates may use the slot `problem`; those of verifier and refiner also `solution`; that of the
    refiner also `review`.

    Local scores are those of MARTI's conditional form. Generator and refiner get the reward of
    their answer alone; the verifier gets 1 if its verdict on the generator's answer is right, else
    0. A turn whose local score cannot be decided has the score `undecided` instead.
    """
    problem = env.reset(task)
    draft = await team.act("generator", problem=problem)
    draft_score = await grade(team, env, draft.turn, draft.value)
    solution = after_thought(draft.text)
    review = await team.act("verifier", problem=problem, solution=solution)
    says_right = {"1": True, "0": False}.get(review.value or "")
    score_verdict(team, review.turn, draft_score, says_right=says_right)
    final = await ask_for_answer(
        team, env, "refiner", problem=problem, solution=solution, review=after_thought(review.text)
    )
    await env.step(boxed(final.value))


async def math_refine(task: Task, team: TeamSession, env: Env) -> None:
    """Ask `solver`, `verifier`, `refiner` and `finalizer` once each; the last answer is final.

    Templates may use the slot `problem` and those of the agents that spoke before: `solution` (of the
    solver), `review` (of the verifier) and `refined` (of the refiner). The review is the content of the
    tags `<status>` and `<feedback>`, or "" if it is malformed.
    """
    problem = env.reset(task)
    solved = await team.act("solver", problem=problem)
    solution = after_thought(solved.text)
    checked = await team.act("verifier", problem=problem, solution=solution)
    slots = {"problem": problem, "solution": solution, "review": checked.value or ""}
    refined = await team.act("refiner", **slots)
    final = await team.act("finalizer", **slots, refined=after_thought(refined.text))
    await env.step(boxed(final.value))


async def mathchat(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    max_programs: PositiveInt = 2,
    verifier_reads: Literal["all", "programs"] = "all",
) -> None:
    """Ask `solver`, `coder` and `verifier` in this order; the verifier's answer is final.

    The coder is asked again if its program failed or its reply had none. Templates may use the slot
    `problem`; those of coder and verifier also `solution`, and `history`: for each reply of the coder
    the program with its output, or "There was no program." There are no local scores, because a coach
    scores the turns.

    Args:
        max_programs: maximum number of replies of the coder.
        verifier_reads: `all`: the verifier reads the solution and the programs; `programs`: it
            reads the programs only, and its `solution` is "", as in the released code.
    """
    problem = env.reset(task)
    solution = after_thought((await team.act("solver", problem=problem)).text)
    history = ""
    for _ in range(max_programs):
        reply = await team.act("coder", problem=problem, solution=solution, history=history)
        if reply.value is None:
            history += "There was no program.\n\n"
            continue
        call = await env.run(reply.value)
        history += f"{with_output(reply.value.strip(), call.result)}\n\n"
        if not call.failed:
            break
    if verifier_reads == "programs":
        solution = ""
    final = await team.act("verifier", problem=problem, solution=solution, history=history)
    await env.step(boxed(final.value))
