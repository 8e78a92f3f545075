"""Orchestras: who speaks when, one async function per file.

solver_verifier   a solver and a verifier in turn, until approval (Dr.MAS math)
search_team       a verifier routes every turn to a searcher or to the answerer (Dr.MAS search)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollout.orchestras.search_team import search_team
from rollout.orchestras.solver_verifier import solver_verifier

Orchestra = Callable[..., Awaitable[None]]  # (task, team, env, **options)

ORCHESTRAS: dict[str, Orchestra] = {"solver_verifier": solver_verifier, "search_team": search_team}
