"""Tokens that the engine computes for a replay of the estimator `c3`, against those of a whole trajectory.

A replay samples an alternative to a turn's reply, and plays the trajectory on to its end.

Four agents speak one after the other, and each reads all earlier replies, so that an alternative
changes every later prompt. Computed tokens are sampled tokens, and prompt tokens that are not in
the prefix cache. The trajectories of a task share the prefix cache too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.engines.client import EngineClient
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.environments.protocol import Env, Step
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Sampling, Task
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.replays import ReplayPlan
from rollout.teams.roles import Agent, Role
from rollout.teams.team import Team, TeamSession

AGENTS = {
    "solver": "Solve the problem step by step.",
    "critic": "Check every step of the solution, and say which one is wrong.",
    "reviser": "Write the solution again without the errors that were found.",
    "judge": "State the answer of the best solution above.",
}
PROBLEM = (
    "A farmer has 12 cows and 30 hens. Every cow gives 9 litres of milk a day, and every hen lays 5 "
    "eggs a week. How many litres of milk and how many eggs does the farmer have after {weeks} weeks?"
)
TASKS = 4
GROUP = 4
ALTERNATIVES = 3
REPLY_TOKENS = 48
MAX_LENGTH = 1024
GOAL = 0.5


class Letters:
    """Environment that pays the share of vowels in the answer."""

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        vowels = sum(letter in "aeiou" for letter in action)
        return Step(observation="", reward=vowels / max(1, len(action)))


async def chain(task: Task, team: TeamSession, env: Env) -> None:
    """Ask the agents one after the other; each reads all earlier replies."""
    problem = env.reset(task)
    replies = ""
    for name in AGENTS:
        reply = await team.act(name, problem=problem, replies=replies)
        replies += f"{name}: {reply.text}\n"
    await env.step(replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of the engine in a collection.

    Attributes:
        sampled_tokens: number of sampled tokens.
        computed_tokens: sampled tokens, and prompt tokens that were not in the prefix cache.
        seconds: CPU time of the process.
        alternatives: number of replayed alternatives.
    """

    sampled_tokens: int
    computed_tokens: int
    seconds: float
    alternatives: int


def make_agent(name: str, instruction: str) -> Agent:
    role = Role(
        name=name,
        system="",
        user="{problem}\n{replies}" + instruction,
        parse=lambda text: text,
    )
    sampling = Sampling(temperature=1.0, max_tokens=REPLY_TOKENS)
    return Agent(name=name, role=role, policy="shared", sampling=sampling)


def measure(model: Path, replays: ReplayPlan | None) -> Work:
    """Collect all tasks with a new engine."""
    engine = EmbeddedEngine.from_folder(model, max_length=MAX_LENGTH)
    client = EngineClient(
        engine=LocalEngine(engine), renderer=Renderer(model), max_length=MAX_LENGTH
    )
    agents = {name: make_agent(name, instruction) for name, instruction in AGENTS.items()}
    tasks = [
        Task(
            id=str(weeks),
            prompt=PROBLEM.format(weeks=weeks),
            answers=(),
            env="letters",
            source="farm",
            split="train",
        )
        for weeks in range(TASKS)
    ]
    collector = Collector(
        team=Team(agents, {"shared": client}),
        make_env=lambda task: Letters(),
        orchestra=chain,
        seed=1,
        step=0,
        options=CollectOptions(replays=replays),
    )
    began = time.process_time()
    groups = asyncio.run(collector.collect(tasks, GROUP))
    seconds = time.process_time() - began
    turns = [turn for group in groups for played in group.trajectories for turn in played.turns]
    return Work(
        sampled_tokens=engine.stats.decode_tokens,
        computed_tokens=engine.stats.prefill_tokens + engine.stats.decode_tokens,
        seconds=seconds,
        alternatives=sum(bool(turn.node) for turn in turns),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alternatives", type=int, default=ALTERNATIVES)
    options = parser.parse_args()
    plan = ReplayPlan(agents=AGENTS, alternatives=options.alternatives)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model)
        whole = measure(model, None)
        replayed = measure(model, plan)

    trajectories = TASKS * GROUP
    ratios = {}
    for name in ("sampled_tokens", "seconds", "computed_tokens"):
        per_trajectory = getattr(whole, name) / trajectories
        of_alternatives = getattr(replayed, name) - getattr(whole, name)
        ratios[name] = of_alternatives / replayed.alternatives / per_trajectory
        print(
            f"{name}: {per_trajectory:.4g} per trajectory, {ratios[name]:.2f} times as much per "
            "alternative"
        )
    print_result(
        "replays",
        ratios["computed_tokens"],
        goal=GOAL,
        reference="whole_trajectories",
        repeats=replayed.alternatives,
        at_most=True,
    )


if __name__ == "__main__":
    main()
