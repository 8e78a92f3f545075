"""Turns per second of one core's time that the controller drives, with an engine that answers at once."""

import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from rollout.engines import EngineClient
from rollout.environments.protocol import Step
from rollout.orchestras.sequential import solver_verifier
from rollout.records.trajectory import Completion, Sampling, Task, VersionSpan
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.roles import ROLES, Agent
from rollout.teams.team import Team
from rollout.teams.tree import Branching

TASKS, GROUP, LOOPS, REPEATS, GOAL, TIMES = 64, 8, 4, 5, 10_000, 2.0
TREE = Branching(width=4)
PROMPT, REPLY, TEXT = (
    tuple(range(512)),
    tuple(range(128)),
    "a thought on the problem, and some more words. " * 10,
)


class Constant:
    """A renderer that costs nothing: what it would cost is the tokenizer's."""

    stop = (REPLY[-1],)

    def render(self, messages: object) -> tuple[int, ...]:
        return PROMPT

    def decode(self, token_ids: object) -> str:
        return TEXT


class Instant:
    """An engine that costs nothing either."""

    version = 0
    reply = Completion(
        token_ids=REPLY,
        logprobs=(0.0,) * len(REPLY),
        finish_reason="stop",
        versions=(VersionSpan(version=0, start=0, end=len(REPLY)),),
    )

    async def generate(self, prompt_ids: object, sampling: object) -> Completion:
        return self.reply


class Yes:
    """An environment that pays 1."""

    def __init__(self, task: Task) -> None:
        pass

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        return Step(reward=1.0, metrics={"answered": 1.0})


def turns_per_second(repeat: int, tree: Branching | None = None) -> float:
    """Of one collection; every reply is malformed, so each line has 2 · LOOPS − 1 turns.

    The process's own time, which other processes on the machine do not lengthen.
    """
    sampling = Sampling(max_tokens=len(REPLY))
    agents = {
        name: Agent(name=name, role=ROLES[name], policy="p", sampling=sampling)
        for name in ("solver", "verifier")
    }
    team = Team(agents, {"p": EngineClient(engine=Instant(), renderer=Constant())})
    tasks = [
        Task(id=str(n), prompt=f"{n}: {TEXT}", answers=("1",), env="yes", source="s", split="train")
        for n in range(TASKS)
    ]

    async def orchestra(*who: object) -> None:
        await solver_verifier(*who, max_loops=LOOPS)

    async def timed() -> float:
        """As a training collects, in a loop that goes on: Python 3.11 spells out what a loop's main task returns."""
        start, options = time.process_time(), CollectOptions(tree=tree)
        own = Collector(
            team=team, make_env=Yes, orchestra=orchestra, seed=0, step=repeat, options=options
        )
        groups = await own.collect(tasks, GROUP)
        seconds = time.process_time() - start
        turns = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
        assert turns == TASKS * GROUP * (2 * LOOPS - 1) * (tree.width if tree else 1)
        return turns / seconds

    return asyncio.run(timed())


def main() -> None:
    """Takes the median of several collections."""
    rates = [turns_per_second(repeat) for repeat in range(REPEATS)]
    print(f"lines: {', '.join(f'{rate:.0f}' for rate in rates)} turns/s")
    print(f"trees of width {TREE.width}, replays included: {turns_per_second(0, TREE):.0f} turns/s")
    ratio = statistics.median(rates) / GOAL
    print(
        f"name=controller_overhead ratio={ratio:.2f} goal={TIMES:.2f} reference=10k_turns_per_s n={REPEATS}"
    )


if __name__ == "__main__":
    main()
