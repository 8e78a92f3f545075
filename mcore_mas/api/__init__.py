"""Python API: teams, tasks, environments and rewards as objects; training, evaluation and export of them.

`import mcore_mas as mm` has the same names. They are the public surface: docs/api.md is made from their docstrings.
"""

from mcore_mas.api.objects import AgentSpec, Conversation, load_tasks
from mcore_mas.api.run import Run
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.rollout.environments.math import last_boxed
from mcore_mas.rollout.environments.protocol import Env, Step, ToolCall, last_tag
from mcore_mas.rollout.records.trajectory import Group, Status, Task, Trajectory
from mcore_mas.rollout.tasks import Generator
from mcore_mas.rollout.teams.roles import register_agent
from mcore_mas.rollout.teams.team import TeamSession

__all__ = [
    "AgentSpec",
    "Conversation",
    "Env",
    "Generator",
    "Group",
    "Run",
    "Status",
    "Step",
    "Task",
    "TeamSession",
    "ToolCall",
    "Trajectory",
    "last_boxed",
    "last_tag",
    "load_tasks",
    "make_tiny_model",
    "register_agent",
]
