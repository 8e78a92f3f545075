"""Environments: one task's world, used by one trajectory.

math     the boxed answer of the team's last text, scored 1 or 0; mathematics.py compares what integers cannot
search   a retriever to ask, then an answer to give, scored by exact match
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.envs.math import MathEnv
from rollout.envs.protocol import Env
from rollout.envs.search import Retriever, SearchEnv
from rollout.records import Task

EnvFactory = Callable[..., Env]  # (task, **options) -> a fresh environment for one trajectory


def make_math(task: Task) -> MathEnv:
    """The environment of a math task."""
    return MathEnv()


def make_search(task: Task, *, retriever: Retriever, top_k: int = 3, style: str = "search_r1") -> SearchEnv:
    """The environment of a question over `retriever`'s passages."""
    return SearchEnv(retriever, top_k=top_k, style=style)


ENVS: dict[str, EnvFactory] = {"math": make_math, "search": make_search}
