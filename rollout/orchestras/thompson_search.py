"""Tree search by Thompson sampling: AB-MCTS-A, Inoue et al. 2025 (arXiv 2503.04412).

Every node has two posteriors of scores: GEN, given the scores that its children had when they were
added, and CONT, given the scores of all nodes that were added below its children. `TreeSearch`
starts at the root and draws a score from both. If GEN draws the higher score, the node gets another
child. Otherwise the search goes on at the child whose posterior, given the scores in its subtree,
draws the highest score.

The agent that makes the new node is chosen in the same way, given all scores of each agent, as
TreeQuest's `multiarm_bandit_thompson` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from typing import TypeVar

# Draws a mean score from the posterior of the mean, given the scores so far.
ScoreDraw = Callable[[Sequence[float], Random], float]
_Key = TypeVar("_Key")


def draw_beta(scores: Sequence[float], random: Random) -> float:
    """Draw from the posterior of the mean of scores in [0, 1].

    The prior is that of Jeffreys, Beta(a, b) with a = b = 1/2, and the posterior of scores r is
    Beta(a + Σ r, b + Σ (1 - r)).
    """
    alpha = 0.5 + sum(scores)
    beta = 0.5 + len(scores) - sum(scores)
    return random.betavariate(alpha, beta)


def draw_gaussian(scores: Sequence[float], random: Random) -> float:
    """Draw from the posterior of the mean of normally distributed scores.

    The prior is σ² ~ Inv-χ²(ν, τ²) and μ ~ N(m, σ²/κ), with m = 0, κ = ν = 1 and τ² = 0.1. The
    posterior is that of Murphy, Probabilistic Machine Learning II, 3.4.3.3.
    """
    n = len(scores)
    mean = sum(scores) / max(n, 1)
    squares = sum((score - mean) ** 2 for score in scores)  # Σ (r - r̄)²
    kappa = nu = 1.0 + n
    # (ν τ² + Σ (r - r̄)² + n κ (m - r̄)² / (κ + n)) / (ν + n), with the prior's m, κ, ν and τ²
    tau_squared = (0.1 + squares + n * mean**2 / kappa) / nu
    chi_squared = random.gammavariate(nu / 2, 2.0)  # a draw of χ²(ν)
    variance = nu * tau_squared / chi_squared
    return random.gauss(n * mean / kappa, sqrt(variance / kappa))


POSTERIORS: dict[str, ScoreDraw] = {"gaussian": draw_gaussian, "beta": draw_beta}


@dataclass(eq=False, slots=True, kw_only=True)
class SearchNode:
    """A node of the tree: an attempt, or the root, which has no attempt."""

    name: str = ""  # index of the child on each level, from the root: "0.2"
    parent: SearchNode | None = None
    score: float = 0.0
    children: list[SearchNode] = field(default_factory=list)
    scores_below_children: list[float] = field(default_factory=list)  # those of CONT
    subtree_scores: list[float] = field(
        default_factory=list
    )  # of the node and all nodes below it; the root has none


class TreeSearch:
    """A tree of scored attempts, which selects parent and agent of the next attempt."""

    def __init__(self, agents: Sequence[str], draw: ScoreDraw) -> None:
        """Start with the root alone.

        Args:
            agents: agents that may make a node.
            draw: draws from the posterior of scores.
        """
        self.root = SearchNode()
        self.scores: dict[str, list[float]] = {agent: [] for agent in agents}
        self._draw = draw

    def select(self, random: Random) -> tuple[SearchNode, str]:
        """Return the node that gets the next child, and the agent that makes it."""
        node = self.root
        while node.children:
            branches = {
                "GEN": [child.score for child in node.children],
                "CONT": node.scores_below_children,
            }
            if self._highest_draw(branches, random) == "GEN":
                break
            subtrees = {index: child.subtree_scores for index, child in enumerate(node.children)}
            node = node.children[self._highest_draw(subtrees, random)]
        return node, self._highest_draw(self.scores, random)

    def add(self, parent: SearchNode, agent: str, score: float) -> SearchNode:
        """Add and return the child that `agent` made; count its score for the agent and for the nodes above."""
        index = len(parent.children)
        name = f"{parent.name}.{index}" if parent.name else str(index)
        node = SearchNode(name=name, parent=parent, score=score, subtree_scores=[score])
        self.scores[agent].append(score)
        parent.children.append(node)

        # The new node is below `ancestor`, a child of `ancestor.parent`: its score counts in the subtree of the
        # one, and in CONT of the other.
        ancestor = parent
        while ancestor.parent is not None:
            ancestor.subtree_scores.append(score)
            ancestor.parent.scores_below_children.append(score)
            ancestor = ancestor.parent
        return node

    def _highest_draw(self, scores: Mapping[_Key, Sequence[float]], random: Random) -> _Key:
        """Return the key whose posterior draws the highest score; draw nothing for a single key."""
        if len(scores) == 1:
            return next(iter(scores))
        draws = {key: self._draw(values, random) for key, values in scores.items()}
        return max(draws, key=draws.__getitem__)
