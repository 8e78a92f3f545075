"""Agents one after the other: Dr.MAS's solver and verifier, MARTI's chain, UnityMAS-O's math team, MAPPA's MathChat.

But in the first, texts are handed on without their thoughts, malformed ones as they were said, and a malformed last
reply leaves the team without an answer.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from rollout.environments.protocol import Env, PlayedEnv, after_thought
from rollout.orchestras.replies import boxed, grade, graded, with_output
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


def slots(problem: str, said: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The slots of both user templates, at rollout and in demonstrations alike.

    Args:
        problem: the problem as the environment states it.
        said: (agent, text) of everything said so far, oldest first.

    Returns:
        `problem`; `team_context`, all that was said, each text after its speaker's name and before a blank line,
        "" at the start; `solution`, the solver's latest text, "" at the start.
    """
    context = "".join([f"[{agent}]\n{text}\n\n" for agent, text in said])
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

    The verifier speaks after every attempt but the last one possible, whose verdict could change nothing.

    Args:
        max_loops: attempts of the solver, at most.
        malformed_verdict: what a malformed verdict counts as.
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


async def chain(task: Task, team: TeamSession, env: PlayedEnv) -> None:
    """Ask `generator`, `verifier` and `refiner` in this order; the refiner's answer is final.

    Templates may use the slots `problem`, the verifier's and the refiner's also `solution`, the refiner's also
    `review`. Local scores, as in MARTI's conditional form: of the generator and the refiner the reward that their
    answers would have alone, of the verifier 1 when its verdict on the generator's answer is true, else 0; what cannot
    be decided has the score `undecided` in place of a local one.
    """
    problem = env.reset(task)
    draft = await team.act("generator", problem=problem)
    right = await grade(team, env, draft.turn, draft.value)
    solution = after_thought(draft.text)
    review = await team.act("verifier", problem=problem, solution=solution)
    if right is None:
        team.score(review.turn, undecided=1.0)
    else:
        team.score(review.turn, local=float(review.value == str(int(right > 0))))
    final = await graded(
        team, env, "refiner", problem=problem, solution=solution, review=after_thought(review.text)
    )
    await env.step(boxed(final.value))


async def math_refine(task: Task, team: TeamSession, env: Env) -> None:
    """Ask `solver`, `verifier`, `refiner` and `finalizer` once each, without a way out; the last answer is final.

    Templates may use the slots `problem` and, of those who spoke before, `solution`, `review` and `refined`. Of the
    verifier only the two tags' content is handed on; a malformed finding is "".
    """
    problem = env.reset(task)
    solved = await team.act("solver", problem=problem)
    solution = after_thought(solved.text)
    checked = await team.act("verifier", problem=problem, solution=solution)
    seen = {"problem": problem, "solution": solution, "review": checked.value or ""}
    refined = await team.act("refiner", **seen)
    final = await team.act("finalizer", **seen, refined=after_thought(refined.text))
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

    The coder is asked again, `max_programs` times in all, when its program failed or its reply had none. Templates may
    use the slots `problem`, the coder's and the verifier's also `solution`, and `history`, every program with what came
    of it. With `programs` the verifier's `solution` is "", as in the released code. Nobody is scored alone: that is the
    coach's part.

    Args:
        max_programs: replies of the coder, at most.
        verifier_reads: `all`: the verifier reads the solution and the programs; `programs`: the programs alone.
    """
    problem = env.reset(task)
    solution = after_thought((await team.act("solver", problem=problem)).text)
    history = ""
    for _ in range(max_programs):
        program = (
            await team.act("coder", problem=problem, solution=solution, history=history)
        ).value
        if program is None:
            history += "There was no program.\n\n"
            continue
        call = await env.run(program)
        history += f"{with_output(program.strip(), call.result)}\n\n"
        if not call.failed:
            break
    read = solution if verifier_reads == "all" else ""
    final = await team.act("verifier", problem=problem, solution=read, history=history)
    await env.step(boxed(final.value))
