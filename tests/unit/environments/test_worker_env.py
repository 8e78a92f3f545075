"""Environments in worker processes: the same games, and workers that end, block or are interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.base.errors import Defect, EnvError, Undecided
from rollout.config.environment import EnvConfig, build_env
from rollout.environments import worker_process
from rollout.environments.protocol import Env, Step, ToolCall
from rollout.records.trajectory import Status, Task, Trajectory
from tests.support.casts import SUM, grow, play

ROOT = Path(__file__).resolve().parents[3]
BUSY = "tests.support.busy_worlds:BusyEnv"
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "make": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
GAME = replace(SUM, prompt="Play.", answers=("3",), env="gymnasium")


def make_env(name: str, workers: int, **options: Any) -> Callable[[Task], Any]:
    """Return the function that makes an environment, as a run does."""
    return build_env(EnvConfig(name=name, options=options, workers=workers))


def run(scenario: Callable[[Callable[[], Any]], Awaitable[Any]], workers: int = 1) -> Any:
    """Run a scenario, which gets a function that makes a busy environment."""
    make = make_env(BUSY, workers)
    return asyncio.run(scenario(lambda: make(SUM)))  # type: ignore[arg-type]


async def opened(make: Callable[[], Any]) -> Any:
    """Return an environment that is open and reset."""
    env = make()
    await env.open(SUM)
    env.reset(SUM)
    return env


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return the parts of a trajectory that do not tell the time."""
    tools = [(event.tool, event.query, event.result) for event in trajectory.tools]
    return {
        "turns": trajectory.turns,
        "tools": tools,
        "outcome": trajectory.outcome,
        "metrics": trajectory.metrics,
        "status": trajectory.status,
        "answer": trajectory.answer,
    }


def test_a_game_in_a_worker_is_the_same_game() -> None:
    replies = [f"<action>{name}</action>" for name in ("down", "jump", "down", "right", "right")]
    [local, in_worker] = [
        play(
            "single",
            {"player": "world_player"},
            *replies,
            task=GAME,
            make_env=make_env("gymnasium", number, **LAKE, max_turns=5),
            max_turns=5,
        )
        for number in (0, 2)
    ]
    assert local[0].status is Status.COMPLETED
    assert plain(in_worker[0]) == plain(local[0])
    assert in_worker[1] == local[1]  # the prompts


@pytest.mark.slow
def test_a_tree_in_workers_is_the_same_tree() -> None:
    replies = {
        ("player", 0, ""): "<action>down</action>",
        ("player", 1, ""): "<action>down</action>",
        ("player", 2, ""): "<action>right</action>",
        ("player", 0, "1"): "<action>left</action>",
        ("player", 1, "0.1"): "<action>left</action>",
        ("player", 2, "0.0.1"): "<action>left</action>",
    }
    [local, in_worker] = [
        grow(
            "single",
            {"player": "world_player"},
            replies,
            task=GAME,
            make_env=make_env("gymnasium", number, **LAKE),
            max_turns=3,
        )
        for number in (0, 2)
    ]
    assert plain(in_worker) == plain(local)
    assert in_worker.leaf == local.leaf == "0.0.0"


def test_optional_methods_are_those_of_the_environment() -> None:
    async def scenario(make: Callable[[], Any]) -> None:
        env = make()
        assert not hasattr(env, "decision")  # unknown before open
        await env.open(SUM)
        assert env.reset(SUM) == "What is 3+4? after 0 steps"
        assert env.state() == "0"
        step = await env.step("end 7")
        assert (step.reward, step.done, step.answer) == (0.5, True, "7")
        assert step.tools == (ToolCall(tool="order", query="end", result="7"),)
        assert env.state() == "1"
        assert (await env.decision()).observation == "1"
        assert not hasattr(env, "preview") and not hasattr(env, "files")
        with pytest.raises(EnvError, match="is reset once"):
            env.reset(SUM)
        await env.close()

    run(scenario)


def test_an_environment_in_a_worker_does_without_a_retriever() -> None:
    make = make_env("tests.support.busy_worlds:may_ask_retriever", 1)

    async def scenario() -> str:
        env = make(SUM)
        await env.open(SUM)
        problem = env.reset(SUM)
        await env.close()
        return str(problem)

    assert asyncio.run(scenario()) == "What is 3+4? after 0 steps"


@pytest.mark.parametrize(
    ("name", "options", "key", "purchase"),
    [
        (
            "alfworld",
            {"config": str(ROOT / "tests" / "support" / "alfworld.yaml")},
            str(ROOT / "tests" / "support" / "near.tw-pddl"),
            ["look", "take apple 1 from fridge 1"],
        ),
        ("webshop", {}, "1", ["search[hat]", "click[blue hat]", "click[buy now]"]),
    ],
)
def test_text_worlds_are_played_in_workers(
    name: str,
    options: dict[str, Any],
    key: str,
    purchase: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers import the packages, here stand-ins, from where the run's process does."""
    stand_ins = {
        "alfworld/agents/environment.py": "from tests.support.worlds import get_environment",
        "web_agent_site/envs.py": "from tests.support.worlds import FakeShop as WebAgentTextEnv",
    }
    for path, line in stand_ins.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = replace(GAME, answers=(key,), env=name)
    make = make_env(name, 2, **options)

    async def play_game() -> Step:
        env = make(task)
        await env.open(task)
        env.reset(task)
        steps = [await env.step(action) for action in purchase]
        await env.close()
        return steps[-1]

    async def play_two() -> list[Step]:
        return await asyncio.gather(play_game(), play_game())

    for step in asyncio.run(play_two()):
        assert (step.reward, step.done, step.metrics["solved"]) == (1.0, True, 1.0)


def test_prints_of_an_environment_do_not_disturb_replies() -> None:
    async def scenario(make: Callable[[], Any]) -> float:
        env = await opened(make)
        reward = (await env.step("print {")).reward
        await env.close()
        return float(reward)

    assert run(scenario) == 0.5


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("raise env", EnvError, "^the world is out$"),
        ("raise undecided", Undecided, "^who knows$"),
        ("exit", Defect, r"BusyEnv\.step: ValueError: invalid literal.*\(busy_worlds\.py:\d+\)"),
    ],
)
def test_errors_keep_their_kind(action: str, kind: type[Exception], message: str) -> None:
    async def scenario(make: Callable[[], Any]) -> None:
        env = await opened(make)
        with pytest.raises(kind, match=message):
            await env.step(action)
        await env.close()

    run(scenario)


def test_a_worker_that_ends_fails_only_its_trajectories() -> None:
    async def scenario(make: Callable[[], Any]) -> None:
        crashing, other = await opened(make), await opened(make)
        neighbour = await opened(make)  # in the worker of the first
        with pytest.raises(EnvError, match="the worker process ended: no error was printed"):
            await crashing.step("exit 3")
        with pytest.raises(EnvError, match="the worker process ended"):
            await neighbour.step("go")
        assert (await other.step("go")).observation == "step 1"
        for env in (crashing, neighbour):
            await env.close()
        later = await opened(make)  # in a new worker
        process = (await later.step("go")).metrics["process"]
        assert process != (await other.step("go")).metrics["process"]

    run(scenario, workers=2)


def test_a_blocked_worker_leaves_the_event_loop_free() -> None:
    async def scenario(make: Callable[[], Any]) -> int:
        env = await opened(make)
        ticks = 0
        step = asyncio.create_task(env.step("sleep 0.5"))
        while not step.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await env.close()
        return ticks

    assert run(scenario) >= 5  # and 1 if the step blocked the loop


@pytest.mark.slow
def test_a_step_that_goes_on_though_cancelled_ends_with_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.2)

    async def scenario(make: Callable[[], Any]) -> None:
        env = await opened(make)
        process = int((await env.step("go")).metrics["process"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step("sleep 60"), 0.1)
        for _ in range(100):
            if not psutil.pid_exists(process):
                break
            await asyncio.sleep(0.05)
        assert not psutil.pid_exists(process)
        await env.close()
        assert (await (await opened(make)).step("go")).reward == 0.5

    run(scenario)


def test_a_reply_that_is_too_long_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_MAX_REPLY_BYTES", 1000)

    async def scenario(make: Callable[[], Any]) -> None:
        env = await opened(make)
        with pytest.raises(EnvError, match="the worker process sent a reply that cannot be read: "):
            await env.step(f"answer {'x' * 5000}")

    run(scenario)


def test_a_worker_that_ends_within_a_reply_is_named_by_its_error() -> None:
    code = "import sys; sys.stdin.readline(); print('{', end=''); sys.exit('out of memory')"

    async def scenario() -> None:
        worker = worker_process.WorkerProcess("env", [sys.executable, "-c", code])
        with pytest.raises(EnvError, match="the worker process ended: out of memory"):
            await worker.request(method="step")

    asyncio.run(scenario())


@pytest.mark.slow
def test_workers_serve_until_the_event_loop_ends() -> None:
    async def scenario(make: Callable[[], Any]) -> list[int]:
        processes = []
        for _ in range(2):
            env = await opened(make)
            processes.append(int((await env.step("go")).metrics["process"]))
            await env.close()
        return processes

    first, second = run(scenario)
    assert first == second != os.getpid()
    assert not psutil.pid_exists(first)


_PROGRAM = f"""
import asyncio
from rollout.config.environment import EnvConfig, build_env
from tests.support.casts import SUM

async def main():
    env = build_env(EnvConfig(name={BUSY!r}, workers=1))(SUM)
    await env.open(SUM)
    try:
        print(int((await env.step("go")).metrics["process"]), flush=True)
        await env.step("sleep 60")
    finally:
        await env.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_run(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run_process:
        assert run_process.stdout is not None
        worker = int(run_process.stdout.readline())
        time.sleep(0.2)
        began = time.monotonic()
        run_process.send_signal(number)
        run_process.wait(60)
        took_s = time.monotonic() - began
    for _ in range(50):
        if not psutil.pid_exists(worker):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(worker)
    assert took_s < 15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mcp", "it records its calls"),
        ("openenv", r"set env\.options\.servers"),
        ("search", "it needs the retriever of the run's process"),
        ("tests.support.busy_worlds:ask_retriever", "it needs the retriever of the run's process"),
        ("tests.support.busy_worlds:PayingEnv", "it records its calls"),
        ("verifiers", r"set env\.options\.workers"),
    ],
)
def test_environments_that_workers_cannot_play_are_refused(name: str, message: str) -> None:
    options = {
        "openenv": {"url": "http://x"},
        "verifiers": {"id": "x"},
        "mcp": {"servers": {"a": {"command": "x"}}},
    }
    with pytest.raises(ValueError, match=f"env '{name}' cannot be played in workers: .*{message}"):
        EnvConfig(name=name, options=options.get(name, {}), workers=2)


def test_a_world_that_cannot_be_opened_fails_its_trajectory() -> None:
    env: Env = make_env("gymnasium", 1, id="Nope-v0")(GAME)
    with pytest.raises(EnvError, match="gymnasium cannot make 'Nope-v0'"):
        asyncio.run(env.open(GAME))  # type: ignore[attr-defined]
