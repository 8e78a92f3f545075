"""UnityMAS-O's math team: a solver, a verifier, a refiner and a finalizer, each once."""

from __future__ import annotations

from rollout.base.tags import after_thought, last_tag
from rollout.environments.protocol import Env
from rollout.orchestras.answers import boxed, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession, register_agent

STATUSES = ("correct", "incorrect")
_SYSTEM = "You are a member of a team of four that solves math problems."

register_agent(
    "refine_solver",
    system=_SYSTEM,
    user="""# Problem
{problem}

# Your role
You are the solver. Reason step by step, and put your answer within \\boxed{{}}.""",
)(parse_boxed)


@register_agent(
    "refine_verifier",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The solver's solution
{solution}

# Your role
You are the verifier. Check every step. Then end with your finding and what the refiner should know, in these two tags:
<status>correct</status> or <status>incorrect</status>
<feedback>the first wrong step, what kind of mistake it is, and how to mend it; or why the solution holds</feedback>""",
)
def parse_review(text: str) -> str | None:
    """The status and the feedback as two lines, None unless both tags are there and the status is known."""
    text = after_thought(text)
    status, feedback = last_tag(text, "status"), last_tag(text, "feedback")
    return f"{status}\n{feedback}" if status in STATUSES and feedback else None


register_agent(
    "refiner",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The solver's solution
{solution}

# The verifier's finding
{review}

# Your role
You are the refiner. Write the solution anew: mend what the verifier is right about, keep what holds. Reason step by
step, and put your answer within \\boxed{{}}.""",
)(parse_boxed)

register_agent(
    "finalizer",
    system=_SYSTEM,
    user="""# Problem
{problem}

# The solver's solution
{solution}

# The verifier's finding
{review}

# The refiner's solution
{refined}

# Your role
You are the finalizer. Decide which answer the team gives, in the form that the problem asks for. Say briefly why, and
put it within \\boxed{{}}.""",
)(parse_boxed)


async def math_refine(task: Task, team: TeamSession, env: Env) -> None:
    """Ask `solver`, `verifier`, `refiner` and `finalizer` once each, without a way out; the last answer is final.

    Templates may use the slots `problem` and, of those who spoke before, `solution`, `review` and `refined`. Solutions
    are handed on without their thoughts, malformed ones as they were said; of the verifier only the two tags' content
    is, and a malformed finding is "". A malformed last reply leaves the team without an answer.
    """
    problem = env.reset(task)
    solved = await team.act("solver", problem=problem)
    solution = after_thought(solved.text)
    checked = await team.act("verifier", problem=problem, solution=solution)
    seen = {"problem": problem, "solution": solution, "review": checked.value or ""}
    refined = await team.act("refiner", **seen)
    final = await team.act("finalizer", **seen, refined=after_thought(refined.text))
    await env.step(boxed(final.value))
