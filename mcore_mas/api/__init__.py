"""Python API: teams, tasks, environments and rewards as objects; training, evaluation and export.

`import mcore_mas as mm` has the names of `__all__`, and only these are promised to stay.
`make site` makes the page of the API from their docstrings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_mas.api.agents import AgentSpec
from mcore_mas.api.conversation import Conversation
from mcore_mas.api.tasks import load_tasks
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.base.hints import nearest_hint
from rollout.environments.math_notation import last_boxed
from rollout.environments.protocol import Env, Step, ToolCall, last_tag
from rollout.environments.tools import tool_of
from rollout.records.trajectory import Group, Status, Task, Trajectory
from rollout.tasks.generators import Generator
from rollout.teams.roles import register_agent
from rollout.teams.team import TeamSession

if TYPE_CHECKING:
    from mcore_mas.api.run import Run
    from mcore_mas.equations.turns import Advantages, Turns
    from rollout.rewards.coach import Coach
    from rollout.sandbox import RunLimits, Sandbox

__all__ = [
    "Advantages",
    "AgentSpec",
    "Coach",
    "Conversation",
    "Env",
    "Generator",
    "Group",
    "Run",
    "RunLimits",
    "Sandbox",
    "Status",
    "Step",
    "Task",
    "TeamSession",
    "ToolCall",
    "Trajectory",
    "Turns",
    "last_boxed",
    "last_tag",
    "load_tasks",
    "make_tiny_model",
    "register_agent",
    "tool_of",
]

_LAZY_MODULES = {  # they import torch or the whole pipeline
    "Advantages": "mcore_mas.equations.turns",
    "Coach": "rollout.rewards.coach",
    "Run": "mcore_mas.api.run",
    "RunLimits": "rollout.sandbox",
    "Sandbox": "rollout.sandbox",
    "Turns": "mcore_mas.equations.turns",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _LAZY_MODULES:
        raise AttributeError(
            f"module 'mcore_mas' has no attribute '{name}'; its public names are in "
            f"mcore_mas.api.__all__{nearest_hint(name, __all__)}"
        )
    return getattr(import_module(_LAZY_MODULES[name]), name)
