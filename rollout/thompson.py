"""Adaptive branching tree search: at every node, posteriors decide between going wider and going deeper.

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
from typing import Protocol, TypeVar

Key = TypeVar("Key")


class Posterior(Protocol):
    """What is believed of a mean score."""

    def after(self, scores: Sequence[float]) -> Posterior:
        """The belief once `scores` were seen too.

        Raises:
            ValueError: a score is outside the belief's range.
        """

    def draw(self, random: Random) -> float:
        """A mean score that may be the true one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beta:
    """Of scores in [0, 1]; the prior is Jeffreys'."""

    a: float = 0.5
    b: float = 0.5

    def after(self, scores: Sequence[float]) -> Beta:
        bad = [score for score in scores if not 0.0 <= score <= 1.0]
        if bad:
            raise ValueError(f"a beta posterior takes scores from 0 to 1, and one is {bad[0]:g}; choose gaussian")
        # a + Σ r, b + Σ (1 - r)
        return Beta(a=self.a + sum(scores), b=self.b + len(scores) - sum(scores))

    def draw(self, random: Random) -> float:
        return random.betavariate(self.a, self.b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian:
    """Of any scores: σ² ~ Inv-χ²(ν, τ²), μ ~ N(m, σ²/κ); Murphy, Probabilistic Machine Learning II, 3.4.3.3."""

    m: float = 0.0
    kappa: float = 1.0
    nu: float = 1.0
    tau2: float = 0.1

    def after(self, scores: Sequence[float]) -> Gaussian:
        if not scores:
            return self
        n, mean = len(scores), sum(scores) / len(scores)
        kappa, nu = self.kappa + n, self.nu + n
        spread = sum((score - mean) ** 2 for score in scores)
        # τ²' = (ν τ² + Σ (r - r̄)² + n κ (m - r̄)² / (κ + n)) / (ν + n)
        tau2 = (self.nu * self.tau2 + spread + n * self.kappa * (self.m - mean) ** 2 / kappa) / nu
        return Gaussian(m=(self.kappa * self.m + n * mean) / kappa, kappa=kappa, nu=nu, tau2=tau2)

    def draw(self, random: Random) -> float:
        variance = self.nu * self.tau2 / random.gammavariate(self.nu / 2, 2.0)  # over a draw of χ²(ν)
        return random.gauss(self.m, sqrt(variance / self.kappa))


PRIORS: dict[str, Callable[[], Posterior]] = {"gaussian": Gaussian, "beta": Beta}


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """An attempt in the tree, or the root, which is none."""

    name: str = ""  # child numbers from the root, as "0.2"
    parent: Node | None = None
    score: float = 0.0
    children: list[Node] = field(default_factory=list)
    made: list[float] = field(default_factory=list)  # GEN: scores of its own children
    below: list[float] = field(default_factory=list)  # CONT: scores made below its children
    seen: list[float] = field(default_factory=list)  # its own score, and all made below it


class Search:
    """A tree of attempts and what is believed of them."""

    def __init__(self, agents: Sequence[str], prior: Posterior) -> None:
        """Any of `agents` may make a node; before it has a score, everything is believed as in `prior`."""
        self.root = Node()
        self.scores: dict[str, list[float]] = {agent: [] for agent in agents}
        self._prior = prior

    def select(self, random: Random) -> tuple[Node, str]:
        """Where to make the next node, and who makes it."""
        node = self.root
        while node.children and self._draw({"GEN": node.made, "CONT": node.below}, random) == "CONT":
            chosen = self._draw({i: child.seen for i, child in enumerate(node.children)}, random)
            node = node.children[chosen]
        return node, self._draw(self.scores, random)

    def add(self, parent: Node, agent: str, score: float) -> Node:
        """The node that `agent` made under `parent`; its score is told to everything above it."""
        name = f"{parent.name}.{len(parent.children)}".lstrip(".")
        node = Node(name=name, parent=parent, score=score, seen=[score])
        self._prior.after([score])  # refuses what it cannot take, before anything is written down
        self.scores[agent].append(score)
        parent.children.append(node)
        parent.made.append(score)
        above = parent
        while above.parent is not None:
            above.seen.append(score)
            above.parent.below.append(score)
            above = above.parent
        return node

    def _draw(self, scores: Mapping[Key, Sequence[float]], random: Random) -> Key:
        """The key whose posterior draws highest; where there is one key, nothing is drawn."""
        if len(scores) == 1:
            return next(iter(scores))
        draws = {key: self._prior.after(own).draw(random) for key, own in scores.items()}
        return max(draws, key=draws.__getitem__)
