"""MARTI's chain: a generator, a verifier and a refiner, each once."""

from __future__ import annotations

from rollout.base.tags import after_thought
from rollout.orchestras.answers import AnswerEnv, boxed, grade, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

_SYSTEM = "You are a member of a team that solves problems one after the other."

register_agent(
    "chain_generator",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Your role
You begin. Reason step by step, and put your final answer within \\boxed{{}}.""",
)(parse_boxed)


@register_agent(
    "chain_verifier",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Solution
{solution}

# Your role
You check the solution. Go through it step by step and name every mistake. Then end with your verdict on its final
answer: \\boxed{{1}} if it is right, \\boxed{{0}} if it is not.""",
)
def parse_verdict(text: str) -> str | None:
    """ "1" or "0" from the last box, None when it holds anything else."""
    verdict = parse_boxed(text)
    return verdict if verdict in ("0", "1") else None


register_agent(
    "chain_refiner",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Solution
{solution}

# Review
{review}

# Your role
You decide. Keep what is right in the solution, mend what is not, and judge the review's claims by yourself. Reason step
by step, and put the final answer within \\boxed{{}}.""",
)(parse_boxed)


async def chain(task: Task, team: TeamSession, env: AnswerEnv) -> None:
    """Ask `generator`, `verifier` and `refiner` in this order; the refiner's answer is final.

    Templates may use the slots `problem`, the verifier's and the refiner's also `solution`, the refiner's also
    `review`: what was said before without its thoughts. A malformed solution or verdict is handed on as it was said; a
    malformed last reply leaves the team without an answer, whatever was generated. Local scores, as in MARTI's
    conditional form: of the generator and the refiner the reward that their answers would have alone, of the verifier
    1 when its verdict on the generator's answer is true, else 0, also when it is malformed; what cannot be decided has
    the score `undecided` in place of a local one.

    Raises:
        EnvError: the environment cannot grade single answers.
    """
    problem = env.reset(task)
    draft = await team.act("generator", problem=problem)
    right = await grade(team, env, draft)
    solution = after_thought(draft.text)
    review = await team.act("verifier", problem=problem, solution=solution)
    if right is None:
        team.score(review.turn, undecided=1.0)
    else:
        team.score(review.turn, local=float(review.value == str(int(right > 0))))
    final = await team.act("refiner", problem=problem, solution=solution, review=after_thought(review.text))
    await grade(team, env, final)
    await env.step(boxed(final.value))
