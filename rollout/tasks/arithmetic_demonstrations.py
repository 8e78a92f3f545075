"""Demonstrations of solver and verifier on arithmetic tasks."""

from collections.abc import Iterator, Mapping
from random import Random

from rollout.base.section import Share
from rollout.orchestras.sequential import solver_verifier_slots
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message
from rollout.tasks.arithmetic import LEVELS, Sum, draw_sum
from rollout.tasks.written_sums import review, work_out, work_out_wrongly
from rollout.teams.roles import ROLES, Role

# Shares of demonstrations; all others are second attempts.
_FIRST_ATTEMPTS = 0.75
_VERDICTS = 0.15

# Share of second attempts whose first attempt is wrong; the others are rejected wrongly.
_RIGHTLY_REJECTED = 0.8


def arithmetic_demonstrations(
    seed: int, n: int, *, roles: Mapping[str, Role] = ROLES, slips: Share = 0.0
) -> Iterator[Demonstration]:
    """Yield `n` demonstrations of solver and verifier on training problems.

    Most are first attempts. Fewer are verdicts, half of them on wrong solutions, and second
    attempts after a rejection, which is most often right. Every conversation up to the reply is
    exactly what the orchestra `solver_verifier` would show to the role. In a team without an agent
    `solver`, each agent demonstrates first attempts only.

    Args:
        seed: seed of the run.
        n: number of demonstrations.
        roles: the roles as the rollout will use them, by agent name.
        slips: probability that the solver of a demonstration is careless and drops carries.
    """
    for index in range(n):
        random = Random(derive_seed(seed, "arithmetic demonstration", index))
        source = random.choice(tuple(LEVELS))
        problem = draw_sum(random, source, "train")
        right = work_out(problem.operation, problem.numbers)
        wrong, slip = work_out_wrongly(random, problem.operation, problem.numbers)
        attempt = right
        if random.random() < slips:
            attempt, _ = work_out_wrongly(random, problem.operation, problem.numbers, ("carry",))

        if "solver" not in roles:
            agent = random.choice(tuple(roles))
            yield _demonstrate(roles, problem, history=[], agent=agent, reply=attempt)
            continue

        draw = random.random()
        if draw < _FIRST_ATTEMPTS:
            yield _demonstrate(roles, problem, history=[], agent="solver", reply=attempt)
        elif draw < _FIRST_ATTEMPTS + _VERDICTS:
            solution, mistake = random.choice(((right, None), (wrong, slip)))
            verdict = review(problem.numbers, mistake)
            yield _demonstrate(
                roles, problem, history=[("solver", solution)], agent="verifier", reply=verdict
            )
        else:
            first_attempt = wrong if random.random() < _RIGHTLY_REJECTED else right
            rejection = review(problem.numbers, slip)
            history = [("solver", first_attempt), ("verifier", rejection)]
            yield _demonstrate(roles, problem, history=history, agent="solver", reply=attempt)


def _demonstrate(
    roles: Mapping[str, Role],
    problem: Sum,
    *,
    history: list[tuple[str, str]],
    agent: str,
    reply: str,
) -> Demonstration:
    """Return a reply with its prompt.

    Args:
        roles: role of each agent.
        problem: problem that the team works on.
        history: agents and their earlier replies.
        agent: agent that replies.
        reply: reply of the agent.
    """
    messages = roles[agent].messages(**solver_verifier_slots(problem.text, history))
    return Demonstration(
        agent=agent, messages=(*messages, Message(role="assistant", content=reply))
    )
