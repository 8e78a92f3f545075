"""Tools: what agents can call by name.

python      model-written code in a sandbox (sandbox/)
calculator  arithmetic that is read, never run
files       the work folder of a sandbox's session
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.tools.calculator import Calculator
from rollout.tools.protocol import Tool
from rollout.tools.workspace import Files, Python

ToolFactory = Callable[..., Tool]  # (what it works on, **options)

TOOLS: dict[str, ToolFactory] = {"calculator": Calculator, "files": Files, "python": Python}
