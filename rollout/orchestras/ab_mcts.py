"""Orchestra `ab_mcts`: agents grow a tree of attempts by Thompson sampling (MARTI's MARS2)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from pydantic import PositiveInt

from rollout.base.errors import EnvError, Undecided
from rollout.base.section import Names
from rollout.environments.protocol import PlayedEnv, Step, after_thought
from rollout.orchestras.thompson_search import POSTERIORS, SearchNode, TreeSearch
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession

_MALFORMED_FEEDBACK = "It could not be read: it is not of the form that was asked for."


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """Rules by which attempts are graded.

    Args:
        measure: grade of an attempt: `reward`, or the name of a metric of the environment.
        malformed: grade of a malformed reply.
        stop_at: lowest grade that ends the search; null: no grade ends it.
    """

    measure: str = "reward"
    malformed: float = 0.0
    stop_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """An attempt, as shown to the agent that improves on it."""

    text: str  # of the reply, without its thought
    feedback: str  # of the environment


async def ab_mcts(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    agents: Names = ("generator",),
    max_nodes: PositiveInt = 8,
    posterior: Literal["gaussian", "beta"] = "gaussian",
    grading: Grading = Grading(),
) -> None:
    """Grow a tree of attempts by Thompson sampling, and step the environment with the best one.

    Each attempt starts from the problem alone or improves on an earlier attempt; see
    `TreeSearch`. The parsed reply is the action. Templates may use these slots:

    - `problem`
    - `attempt`: the reply to improve on, without its thought
    - `feedback`: the environment's observation on that reply

    `attempt` and `feedback` are "" in an attempt that starts from the problem.

    The reward and most metrics are computed with the task's answers, so the best attempt is chosen
    with knowledge that no agent has. With `grading.measure: visible_rate`, the environment `code`
    computes grades and feedback from the visible tests only.

    The field `node` of a turn is its node in the tree, and its scores `local` and `branch` are its
    grade. Agents may also improve on the text of a malformed reply. The best attempt, the first of
    equally good ones, is the leaf of the trajectory. If all replies are malformed, the environment
    is stepped with "".

    Args:
        agents: agents that may make an attempt.
        max_nodes: maximum number of attempts in the tree.
        posterior: model of the grades in Thompson sampling; `beta` needs grades from 0 to 1.
        grading: measure of attempts, and the grade that ends the search.

    Raises:
        ValueError: `trainer.branching` already makes a tree of the trajectory.
        Undecided: the environment cannot grade an attempt; its turn has the score `undecided` = 1.
        EnvError: the environment cannot preview, lacks the metric `grading.measure`, or gave a
            grade outside of [0, 1] with the posterior `beta`.
    """
    problem = env.reset(task)
    search = TreeSearch(agents, POSTERIORS[posterior])
    attempts = {search.root.name: _Attempt(text="", feedback="")}  # by name of the node
    best_node: SearchNode | None = None
    best_action = ""
    for number in range(max_nodes):
        parent, agent = search.select(Random(team.seed("node", number)))
        earlier = attempts[parent.name]
        reply = await team.act(
            agent, problem=problem, attempt=earlier.text, feedback=earlier.feedback
        )
        if reply.value is None:
            grade = grading.malformed
            feedback = _MALFORMED_FEEDBACK
        else:
            try:
                preview = await _preview(env, reply.value, grading.measure)
            except Undecided:
                # The trajectory fails. If it is counted as wrong, its turns are trained on, and then
                # this one must be a node too.
                node = search.add(parent, agent, grading.malformed)
                team.set_node(reply.turn, node.name)
                team.score(reply.turn, undecided=1.0)
                raise
            grade = _grade_of(preview, grading.measure)
            feedback = preview.observation
        if posterior == "beta" and not 0.0 <= grade <= 1.0:
            raise EnvError(
                f"ab_mcts: an attempt was graded {grade:g}, and posterior 'beta' needs grades from "
                "0 to 1; use posterior 'gaussian'"
            )

        node = search.add(parent, agent, grade)
        team.set_node(reply.turn, node.name)
        team.score(reply.turn, local=grade, branch=grade)
        attempts[node.name] = _Attempt(text=after_thought(reply.text), feedback=feedback)
        if reply.value is not None and (best_node is None or grade > best_node.score):
            best_node = node
            best_action = reply.value
        if grading.stop_at is not None and grade >= grading.stop_at:
            break
    team.leaf = best_node.name if best_node else ""
    await env.step(best_action)


async def _preview(env: PlayedEnv, action: str, measure: str) -> Step:
    """Return the step that grades an action."""
    if measure == "visible_rate":  # the environment `code` measures it of a program in `<run>` tags
        action = f"<run>\n{action}\n</run>"
    return await env.preview(action)


def _grade_of(step: Step, measure: str) -> float:
    """Return the reward of a step or one of its metrics; 0 for a step without a score."""
    # The reward of a step without a score is 0.
    if measure == "reward" or step.unscored:
        return step.reward
    if measure not in step.metrics:
        raise EnvError(
            f"ab_mcts: the environment does not measure '{measure}'; it measures "
            f"{', '.join(step.metrics)}"
        )
    return step.metrics[measure]
