"""Environments: one task's world, used by one trajectory; an orchestra takes steps in it, over one turn or many.

math         the boxed answer of the team's last text, scored 1 or 0; math_equality compares what integers cannot
code         a program, scored by its tests in a sandbox
data_science tables to predict by programs in one folder, scored on hidden truths (predictions)
repository   an issue, a patch of files (patches), hidden tests
search       a retriever to ask, then an answer to give, scored by exact match or token F1
mcp          tool calls to MCP servers, then an answer
text_world   gymnasium, alfworld, webshop: text worlds of other libraries (text_world_libraries)
games        plan_path, sokoban, sudoku, blocksworld: puzzles with exact rewards
"""

from __future__ import annotations

import atexit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import JsonValue, NonNegativeInt, PositiveFloat, PositiveInt

from rollout.environments.code import CodeEnv, run_program
from rollout.environments.data_science import DataScienceEnv
from rollout.environments.games import GAMES
from rollout.environments.games.game import Game, GameEnv
from rollout.environments.math import MathEnv
from rollout.environments.mcp import McpEnv, McpServer
from rollout.environments.protocol import Env, ToolCall
from rollout.environments.repository import RepositoryEnv
from rollout.environments.search import AnswerReward, PassageStyle, Retriever, SearchEnv
from rollout.environments.text_world import WorldEnv
from rollout.environments.text_world_libraries import AlfworldWorld, GymnasiumWorld, WebshopWorld, shop_thread
from rollout.records.trajectory import Task
from rollout.sandbox import RunLimits, Runner, Sandbox, SandboxFusion

EnvFactory = Callable[..., Env]  # (task, **options) -> a fresh environment for one trajectory
Tier = Literal["auto", "namespaces", "landlock", "unisolated"]  # of this machine's sandbox


def make_math(
    task: Task,
    *,
    sandbox: Runner | None = None,
    server: str | None = None,
    tier: Tier = "auto",
    cpu_s: PositiveInt = 20,
    memory_mb: PositiveInt = 512,
) -> MathEnv:
    """The environment of a math task; programs run in `sandbox`, on a server, or in this process's own of that tier."""
    return MathEnv(_program_runner(sandbox, server, tier, cpu_s, memory_mb))


def make_search(
    task: Task,
    *,
    retriever: Retriever,
    top_k: PositiveInt = 3,
    style: PassageStyle = "search_r1",
    reward: AnswerReward = "exact_match",
) -> SearchEnv:
    """The environment of a question over `retriever`'s passages."""
    return SearchEnv(retriever, top_k=top_k, style=style, reward=reward)


def make_data_science(
    task: Task,
    *,
    sandbox: Sandbox | None = None,
    tier: Tier = "auto",
    reward: Literal["normalised", "gap"] = "normalised",
    malformed: float = 0.0,
    max_turns: PositiveInt | None = None,
    cell_s: PositiveFloat = 60.0,
    memory_mb: PositiveInt = 2048,
    disk_mb: PositiveInt = 256,
) -> DataScienceEnv:
    """The environment of a table to predict, in `sandbox` or in this process's own of that tier."""
    limits = RunLimits(wall_s=cell_s, memory_mb=memory_mb, disk_mb=disk_mb, file_mb=disk_mb)
    runner = sandbox or _own_sandbox(tier)
    return DataScienceEnv(runner, reward=reward, malformed=malformed, max_turns=max_turns, limits=limits)


def make_repository(
    task: Task,
    *,
    sandbox: Sandbox | None = None,
    tier: Tier = "auto",
    max_turns: PositiveInt = 1,
    reward: Literal["all", "rate"] = "all",
    checkouts: str | None = None,
    cpu_s: PositiveInt = 20,
    memory_mb: PositiveInt = 1024,
) -> RepositoryEnv:
    """The environment of a repository to repair, tested in `sandbox` or in this process's own of that tier."""
    limits = RunLimits(cpu_s=cpu_s, wall_s=3.0 * cpu_s, memory_mb=memory_mb, disk_mb=512, files=50_000)
    folder = Path(checkouts) if checkouts else None
    runner = sandbox or _own_sandbox(tier)
    return RepositoryEnv(runner, max_turns=max_turns, reward=reward, checkouts=folder, limits=limits)


def make_mcp(
    task: Task,
    *,
    servers: Mapping[str, McpServer],
    max_turns: PositiveInt = 10,
    reward: AnswerReward = "exact_match",
    deadline_s: PositiveFloat = 30.0,
    start_s: PositiveFloat = 30.0,
    max_chars: PositiveInt = 4000,
) -> McpEnv:
    """The environment of a question to be answered with the tools of MCP servers."""
    return McpEnv(
        servers, max_turns=max_turns, reward=reward, deadline_s=deadline_s, start_s=start_s, max_chars=max_chars
    )


def make_gymnasium(
    task: Task,
    *,
    id: str,
    make: Mapping[str, JsonValue] = MappingProxyType({}),
    actions: Sequence[str] = (),
    goal: float | None = None,
    max_turns: PositiveInt = 30,
    malformed: float = 0.0,
    deadline_s: PositiveFloat = 60.0,
) -> WorldEnv:
    """The environment of a Gymnasium game, `gymnasium.make(id, **make)` with names for its actions."""
    world = partial(GymnasiumWorld, id, make, actions, goal)
    return WorldEnv(world, max_turns=max_turns, malformed=malformed, deadline_s=deadline_s)


def make_alfworld(
    task: Task,
    *,
    config: str,
    max_turns: PositiveInt = 50,
    malformed: float = 0.0,
    deadline_s: PositiveFloat = 120.0,
) -> WorldEnv:
    """The environment of an ALFWorld game, as ALFWorld's own `config` file sets it up."""
    world = partial(AlfworldWorld, config)
    return WorldEnv(world, max_turns=max_turns, malformed=malformed, deadline_s=deadline_s)


def make_webshop(
    task: Task,
    *,
    num_products: PositiveInt | None = 1000,
    max_turns: PositiveInt = 15,
    malformed: float = 0.0,
    deadline_s: PositiveFloat = 600.0,
) -> WorldEnv:
    """The environment of a WebShop errand; the first one of a process loads the shop, which can take minutes."""
    return WorldEnv(
        partial(WebshopWorld, num_products),
        max_turns=max_turns,
        malformed=malformed,
        deadline_s=deadline_s,
        executor=shop_thread(),
    )


def game_maker(game: type[Game[Any]]) -> EnvFactory:
    """The environment of puzzles of one game."""

    def make_game(
        task: Task,
        *,
        max_turns: PositiveInt = 5,
        rewards: Game[Any] | None = None,
        sandbox: Runner | None = None,
        server: str | None = None,
        tier: Tier = "auto",
        cpu_s: PositiveInt = 20,
        memory_mb: PositiveInt = 512,
    ) -> GameEnv[Any]:
        return GameEnv(
            rewards or game(), max_turns=max_turns, run=_program_runner(sandbox, server, tier, cpu_s, memory_mb)
        )

    make_game.__annotations__["rewards"] = game | None  # whose fields are the rewards
    return make_game


def make_code(
    task: Task,
    *,
    sandbox: Runner | None = None,
    server: str | None = None,
    tier: Tier = "auto",
    compare: Literal["tokens", "lines", "floats"] = "tokens",
    reward: Literal["all", "rate"] = "all",
    max_tests: NonNegativeInt = 0,
    cpu_s: PositiveInt = 6,
    memory_mb: PositiveInt = 512,
) -> CodeEnv:
    """The environment of a programming problem, in `sandbox`, on a server, or in this process's own of that tier."""
    limits = RunLimits(cpu_s=cpu_s, wall_s=2.0 * cpu_s, memory_mb=memory_mb)
    runner = sandbox or _own_runner(server, tier)
    return CodeEnv(runner, compare=compare, reward=reward, max_tests=max_tests, limits=limits)


def _program_runner(
    sandbox: Runner | None, server: str | None, tier: Tier, cpu_s: int, memory_mb: int
) -> Callable[[str], Awaitable[ToolCall]]:
    async def run(program: str) -> ToolCall:
        limits = RunLimits(cpu_s=cpu_s, wall_s=2.0 * cpu_s, memory_mb=memory_mb)
        return await run_program(sandbox or _own_runner(server, tier), program, limits)

    return run


@cache
def _own_runner(server: str | None, tier: Tier) -> Runner:
    """What runs whole programs for all trajectories: a SandboxFusion server, or this machine."""
    return SandboxFusion(server) if server else _own_sandbox(tier)


@cache
def _own_sandbox(tier: Tier) -> Sandbox:
    """One for all trajectories; it starts with the first program."""
    sandbox = Sandbox(tier=tier)
    atexit.register(sandbox.close)
    return sandbox


ENVS: dict[str, EnvFactory] = {
    "alfworld": make_alfworld,
    "code": make_code,
    "data_science": make_data_science,
    "gymnasium": make_gymnasium,
    "math": make_math,
    "mcp": make_mcp,
    "repository": make_repository,
    "search": make_search,
    "webshop": make_webshop,
    **{name: game_maker(game) for name, game in GAMES.items()},
}
