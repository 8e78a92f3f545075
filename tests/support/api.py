"""Helpers of the tests of the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mcore_mas as mm

AGENTS = [
    mm.AgentSpec("writer", "{problem}"),
    mm.AgentSpec("editor", "{problem} {draft}", policy="second"),
]
TASKS = [(f"{n}+1", n + 1) for n in range(20)]


async def relay(task, team, env):
    """Play a team in which the writer drafts and the editor revises."""
    draft = await team.act("writer", problem=task.prompt)
    await team.act("editor", problem=task.prompt, draft=draft.text)


def make_run(tmp_path: Path, **arguments: Any) -> mm.Run:
    """Return a run of a tiny model in `tmp_path`/own, with some arguments changed."""
    model = tmp_path / "model"
    if not model.exists():
        mm.make_tiny_model(model)
    defaults = {
        "agents": AGENTS,
        "orchestra": relay,
        "tasks": TASKS,
        "policies": str(model),
        "folder": tmp_path / "own",
        "lr": 1e-3,
    }
    return mm.Run(**defaults | arguments)
