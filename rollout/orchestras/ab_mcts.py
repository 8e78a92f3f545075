"""Tree search by one or several agents: widen or refine attempts by Thompson sampling (AB-MCTS; MARTI's MARS2).

AB-MCTS-A, Inoue et al. 2025 (arXiv 2503.04412). Each node has two posteriors: GEN, of the scores that its own new
children had when they were made, and CONT, of all scores made below its children. A draw from each decides. CONT goes
on at the child whose own posterior draws highest; GEN makes a child here. Which agent makes it is decided by posteriors
over all scores of each agent, as TreeQuest's `multiarm_bandit_thompson` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from typing import Literal, TypeVar

from pydantic import PositiveInt

from rollout.base.errors import EnvError
from rollout.base.section import Names
from rollout.environments.protocol import PlayedEnv, after_thought
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How attempts are graded, and which grade is enough.

    Args:
        measure: how `preview` grades an action: `reward`, or the name of a metric.
        malformed: grade of a malformed reply.
        stop_at: a grade of at least this ends the search; null: none does.
    """

    measure: str = "reward"
    malformed: float = 0.0
    stop_at: float | None = None


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
    """Grow a tree of `max_nodes` attempts by Thompson sampling, and take the best one as the action.

    Each attempt starts from the problem alone or mends an earlier one; whichever of `agents` promises most makes it.
    Templates may use the slots `problem`, `attempt`, the text that is to be mended without its thoughts, and
    `feedback`, what the environment answered to it; both are "" at the root. What its parser makes of a reply is the
    action. Rewards and most metrics know the truth, so the best node is an oracle's choice; in the environment `code`
    the metric `visible_rate` does not, and its feedback is what the visible tests say.

    A turn's `node` is its place in the tree, its scores `local` and `branch` its grade. The text of a malformed
    reply may be mended like any other. The best node, the first of equals, is stepped with, and the trajectory's leaf;
    "" is, where every reply was malformed.

    Args:
        agents: agents that may make an attempt.
        max_nodes: attempts in the tree.
        posterior: model of the grades in Thompson sampling; `beta` needs grades from 0 to 1.
        grading: how attempts are graded, and which grade is enough.

    Raises:
        ValueError: the trajectory is sampled as a tree already.
        EnvError: the environment cannot preview, or does not measure `grading.measure`.
    """
    problem = env.reset(task)
    search = TreeSearch(agents, POSTERIORS[posterior])
    attempts: dict[str, tuple[str, str]] = {"": ("", "")}  # text and feedback, by node
    best: tuple[SearchNode, str] | None = None  # and its action
    for number in range(max_nodes):
        parent, agent = search.select(Random(team.seed("node", number)))
        attempt, feedback = attempts[parent.name]
        reply = await team.act(agent, problem=problem, attempt=attempt, feedback=feedback)
        grade, answer = (
            grading.malformed,
            "It could not be read: it is not of the form that was asked for.",
        )
        if reply.value is not None:
            grade, answer = await _grade(env, reply.value, grading.measure)
        try:
            node = search.add(parent, agent, grade)
        except ValueError as error:
            raise EnvError(f"ab_mcts: {error}") from error
        team.set_node(reply.turn, node.name)
        team.score(reply.turn, local=grade, branch=grade)
        attempts[node.name] = after_thought(reply.text), answer
        if reply.value is not None and (best is None or grade > best[0].score):
            best = node, reply.value
        if grading.stop_at is not None and grade >= grading.stop_at:
            break
    team.leaf = best[0].name if best else ""
    await env.step(best[1] if best else "")


async def _grade(env: PlayedEnv, action: str, measure: str) -> tuple[float, str]:
    """How good an action is, and what the environment says to it."""
    step = await env.preview(f"<run>\n{action}\n</run>" if measure == "visible_rate" else action)
    if measure == "reward":
        return step.reward, step.observation
    if measure not in step.metrics:
        raise EnvError(
            f"ab_mcts: the environment does not measure '{measure}'; it measures {', '.join(step.metrics)}"
        )
    return step.metrics[measure], step.observation


_Key = TypeVar("_Key")


ScoreDraw = Callable[
    [Sequence[float], Random], float
]  # a mean score that may be the true one, given scores


def draw_beta(scores: Sequence[float], random: Random) -> float:
    """From the posterior of scores in [0, 1]; the prior is Jeffreys', Beta(1/2, 1/2).

    Raises:
        ValueError: a score is outside of that.
    """
    bad = [score for score in scores if not 0.0 <= score <= 1.0]
    if bad:
        raise ValueError(
            f"a beta posterior takes scores from 0 to 1, and one is {bad[0]:g}; choose gaussian"
        )
    # a + Σ r, b + Σ (1 - r)
    return random.betavariate(0.5 + sum(scores), 0.5 + len(scores) - sum(scores))


def draw_gaussian(scores: Sequence[float], random: Random) -> float:
    """From the posterior of any scores: σ² ~ Inv-χ²(ν, τ²), μ ~ N(m, σ²/κ); the prior has m = 0, κ = ν = 1, τ² = 0.1.

    Murphy, Probabilistic Machine Learning II, 3.4.3.3.
    """
    n, mean = len(scores), sum(scores) / max(len(scores), 1)
    kappa = nu = 1.0 + n
    spread = sum((score - mean) ** 2 for score in scores)
    # τ²' = (ν τ² + Σ (r - r̄)² + n κ (m - r̄)² / (κ + n)) / (ν + n)
    tau2 = (0.1 + spread + n * mean**2 / kappa) / nu
    variance = nu * tau2 / random.gammavariate(nu / 2, 2.0)  # over a draw of χ²(ν)
    return random.gauss(n * mean / kappa, sqrt(variance / kappa))


POSTERIORS: dict[str, ScoreDraw] = {"gaussian": draw_gaussian, "beta": draw_beta}


@dataclass(eq=False, slots=True, kw_only=True)
class SearchNode:
    """An attempt in the tree, or the root, which is none."""

    name: str = ""  # child numbers from the root, as "0.2"
    parent: SearchNode | None = None
    score: float = 0.0
    children: list[SearchNode] = field(default_factory=list)
    below: list[float] = field(default_factory=list)  # CONT: scores made below its children
    seen: list[float] = field(default_factory=list)  # its own score, and all made below it


class TreeSearch:
    """A tree of attempts and what is believed of them."""

    def __init__(self, agents: Sequence[str], draw: ScoreDraw) -> None:
        """Any of `agents` may make a node; `draw` draws from what is believed of scores."""
        self.root = SearchNode()
        self.scores: dict[str, list[float]] = {agent: [] for agent in agents}
        self._posterior = draw

    def select(self, random: Random) -> tuple[SearchNode, str]:
        """Where to make the next node, and who makes it."""
        node = self.root
        while node.children:
            below = {"GEN": [child.score for child in node.children], "CONT": node.below}
            if self._draw(below, random) == "GEN":
                break
            chosen = self._draw({i: child.seen for i, child in enumerate(node.children)}, random)
            node = node.children[chosen]
        return node, self._draw(self.scores, random)

    def add(self, parent: SearchNode, agent: str, score: float) -> SearchNode:
        """The node that `agent` made under `parent`; its score is told to everything above it."""
        name = f"{parent.name}.{len(parent.children)}".lstrip(".")
        node = SearchNode(name=name, parent=parent, score=score, seen=[score])
        self._posterior(
            [score], Random(0)
        )  # refuses what it cannot take, before anything is written down
        self.scores[agent].append(score)
        parent.children.append(node)
        above = parent
        while above.parent is not None:
            above.seen.append(score)
            above.parent.below.append(score)
            above = above.parent
        return node

    def _draw(self, scores: Mapping[_Key, Sequence[float]], random: Random) -> _Key:
        """The key whose posterior draws highest; where there is one key, nothing is drawn."""
        if len(scores) == 1:
            return next(iter(scores))
        draws = {key: self._posterior(own, random) for key, own in scores.items()}
        return max(draws, key=draws.__getitem__)
