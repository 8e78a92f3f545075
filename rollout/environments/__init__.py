"""Environments: each is the world of one task, in which the agents of one trajectory take steps.

Most environments check the answer by rules or tests and not by a model: verifiable rewards, as in
RLVR. `protocol` describes their methods.

math         an answer in a box, scored 1 or 0 (math_answers, math_comparer,
             math_comparer_main, math_equality, math_limits, math_notation, math_numbers)
code         a program, scored by the task's tests in a sandbox (fenced_programs)
data_science tables to predict by programs in one folder, scored on hidden truths (predictions,
             table_metrics)
repository   an issue, a patch of files (patches, protected_files), hidden tests (hidden_tests,
             hidden_verdicts, decoys)
search       a retriever to query, then an answer, scored by exact match or token F1 (text_scores)
mcp          tool calls to MCP servers, then an answer
verifiers    episodes that the package verifiers plays in worker processes (verifiers_worker)
openenv      worlds at servers that speak OpenEnv's protocol (openenv_session)
text_world   gymnasium, alfworld, webshop: text worlds of other libraries
games        plan_path, sokoban, sudoku, blocksworld: puzzles with exact rewards; kuhn_poker,
             leduc_poker, tic_tac_toe: zero-sum games of two agents, whose strategies are measured
             exactly (best_response)
worker_env   client of an environment that worker processes play, if the option `env.workers` is
             set (worker_process, worker_main, worker_handler)
tools        tools that agents call in chats (calculator, chat_tools, mcp)
running      sandboxes in which environments run programs
"""

from collections.abc import Callable

from rollout.environments.calculator import calculator_tools
from rollout.environments.chat_tools import passage_tools, python_tools, search_tools
from rollout.environments.code import CodeEnv
from rollout.environments.data_science import DataScienceEnv
from rollout.environments.games import GAMES, ZERO_SUM_GAMES
from rollout.environments.games.game import game_env
from rollout.environments.games.zero_sum import zero_sum_env
from rollout.environments.math import MathEnv
from rollout.environments.mcp import McpEnv, mcp_tools
from rollout.environments.openenv import OpenEnvEnv
from rollout.environments.protocol import Env
from rollout.environments.repository import RepositoryEnv
from rollout.environments.search import SearchEnv
from rollout.environments.text_world import AlfworldEnv, GymnasiumEnv, WebshopEnv
from rollout.environments.tools import ToolMaker
from rollout.environments.verifiers import VerifiersEnv

# Environments by name: called as (task, **options) for each trajectory.
ENVS: dict[str, Callable[..., Env]] = {
    "alfworld": AlfworldEnv,
    "code": CodeEnv,
    "data_science": DataScienceEnv,
    "gymnasium": GymnasiumEnv,
    "math": MathEnv,
    "mcp": McpEnv,
    "openenv": OpenEnvEnv,
    "repository": RepositoryEnv,
    "search": SearchEnv,
    "verifiers": VerifiersEnv,
    "webshop": WebshopEnv,
    **{name: game_env(f"{game.__name__}Env", game) for name, game in GAMES.items()},
    **{name: zero_sum_env(game) for name, game in ZERO_SUM_GAMES.items()},
}

# Keyword arguments of environments that are no options of a config. A run passes `retriever`, and tests pass
# `sandbox`, to share one. Environments in workers get neither.
SUPPLIED = frozenset({"retriever", "sandbox"})

# Tools of agents by name: called as (**options) for each trajectory, some also with `env` or `calls`
# (see `ToolMaker`).
TOOLS: dict[str, ToolMaker] = {
    "calculator": calculator_tools,
    "mcp": mcp_tools,
    "passages": passage_tools,
    "python": python_tools,
    "search": search_tools,
}
