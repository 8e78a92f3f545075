"""Environments: one task's world, used by one trajectory; an orchestra takes steps in it, over one turn or many.

Most check the answer itself, by rules or tests and not by a model: verifiable rewards, as in RLVR.

math         the boxed answer of the team's last text, scored 1 or 0; math_equality compares what integers cannot
code         a program, scored by its tests in a sandbox
data_science tables to predict by programs in one folder, scored on hidden truths (predictions)
repository   an issue, a patch of files (patches), hidden tests
search       a retriever to ask, then an answer to give, scored by exact match or token F1
mcp          tool calls to MCP servers, then an answer
text_world   gymnasium, alfworld, webshop: text worlds of other libraries
games        plan_path, sokoban, sudoku, blocksworld: puzzles with exact rewards
tools        what agents call in chats: a calculator, Python with files, search, passages by id
running      the sandboxes that they run programs in
"""

from collections.abc import Callable

from rollout.environments.code import CodeEnv
from rollout.environments.data_science import DataScienceEnv
from rollout.environments.games import GAMES
from rollout.environments.games.game import game_env
from rollout.environments.math import MathEnv
from rollout.environments.mcp import McpEnv, mcp_tools
from rollout.environments.protocol import Env
from rollout.environments.repository import RepositoryEnv
from rollout.environments.search import SearchEnv
from rollout.environments.text_world import AlfworldEnv, GymnasiumEnv, WebshopEnv
from rollout.environments.tools import (
    ToolMaker,
    calculator_tools,
    passage_tools,
    python_tools,
    search_tools,
)

ENVS: dict[
    str, Callable[..., Env]
] = {  # (task, **options) -> a fresh environment for one trajectory
    "alfworld": AlfworldEnv,
    "code": CodeEnv,
    "data_science": DataScienceEnv,
    "gymnasium": GymnasiumEnv,
    "math": MathEnv,
    "mcp": McpEnv,
    "repository": RepositoryEnv,
    "search": SearchEnv,
    "webshop": WebshopEnv,
    **{name: game_env(f"{game.__name__}Env", game) for name, game in GAMES.items()},
}

TOOLS: dict[
    str, ToolMaker
] = {  # (**options) -> what an agent may call in its chats, open for one trajectory
    "calculator": calculator_tools,
    "mcp": mcp_tools,
    "passages": passage_tools,
    "python": python_tools,
    "search": search_tools,
}
