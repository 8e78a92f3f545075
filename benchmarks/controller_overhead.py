"""Turns per second of CPU time that the controller drives, with an engine that answers at once."""

import asyncio
import statistics
import sys
import time
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mcore_mas  # noqa: F401  sets the garbage collector's threshold, as in a training
from benchmarks.support.result import print_result
from rollout.engines import EngineClient
from rollout.environments.protocol import Step
from rollout.orchestras.sequential import solver_verifier
from rollout.records.trajectory import Completion, Sampling, Task, VersionSpan
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from rollout.teams.tree import Branching

TASKS = 64
GROUP = 8
LOOPS = 4
# Every reply is malformed, so the verifier never approves, and the solver has the last turn.
TURNS_PER_TRAJECTORY = 2 * LOOPS - 1
REPEATS = 5
REFERENCE_RATE = 10_000  # turns per second
GOAL = 2.0
TREE = Branching(width=4)
PROMPT_IDS = tuple(range(512))
REPLY_IDS = tuple(range(128))
TEXT = "a thought on the problem, and some more words. " * 10


class ConstantRenderer:
    """Renderer without work; a real one would mostly run the tokenizer."""

    stop = (REPLY_IDS[-1],)

    def render(self, messages: object) -> tuple[int, ...]:
        return PROMPT_IDS

    def decode(self, token_ids: object) -> str:
        return TEXT


class InstantEngine:
    """Engine that returns the same reply at once."""

    version = 0
    completion = Completion(
        token_ids=REPLY_IDS,
        logprobs=(0.0,) * len(REPLY_IDS),
        finish_reason="stop",
        versions=(VersionSpan(version=0, start=0, end=len(REPLY_IDS)),),
    )

    async def generate(self, prompt_ids: object, sampling: object) -> Completion:
        return self.completion


class AlwaysRewarding:
    """Environment that rewards every action with 1."""

    def __init__(self, task: Task) -> None:
        pass

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        return Step(reward=1.0, metrics={"answered": 1.0})


async def run_orchestra(*arguments: object) -> None:
    await solver_verifier(*arguments, max_loops=LOOPS)


async def collect(step: int, tree: Branching | None) -> float:
    """Collect one batch; return its turns per second of this process's CPU time.

    The CPU time of this process does not depend on other processes of the machine. It is measured
    inside the event loop, as in a training, because Python 3.11 formats the whole result of the
    loop's main task at its end.
    """
    sampling = Sampling(max_tokens=len(REPLY_IDS))
    agents = {
        name: Agent(name=name, role=ROLES[name], policy="p", sampling=sampling)
        for name in ("solver", "verifier")
    }
    client = EngineClient(engine=InstantEngine(), renderer=ConstantRenderer())
    tasks = [
        Task(id=str(n), prompt=f"{n}: {TEXT}", answers=("1",), env="yes", source="s", split="train")
        for n in range(TASKS)
    ]

    began = time.process_time()
    collector = Collector(
        team=Team(agents, {"p": client}),
        make_env=AlwaysRewarding,
        orchestra=run_orchestra,
        seed=0,
        step=step,
        options=CollectOptions(tree=tree),
    )
    groups = await collector.collect(tasks, GROUP)
    seconds = time.process_time() - began

    turns = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
    width = tree.width if tree else 1
    assert turns == TASKS * GROUP * TURNS_PER_TRAJECTORY * width
    return turns / seconds


def main() -> None:
    """Measure several collections; the result is the median."""
    rates = [asyncio.run(collect(step, tree=None)) for step in range(REPEATS)]
    print(f"without branching: {', '.join(f'{rate:.0f}' for rate in rates)} turns/s")
    tree_rate = asyncio.run(collect(0, TREE))
    print(f"trees of width {TREE.width}, with replays: {tree_rate:.0f} turns/s")
    print_result(
        "controller_overhead",
        statistics.median(rates) / REFERENCE_RATE,
        goal=GOAL,
        reference="10k_turns_per_s",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
