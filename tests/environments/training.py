"""Training of a tiny random model in an unchanged published environment, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from rollout.config.agents import build_team
from rollout.config.environment import build_env
from rollout.config.reward import build_allocator
from rollout.engines import EngineClient
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Group, Status, Task
from rollout.tasks.generators import GENERATORS
from tests.environments.published import ECHO, POEMS, ROOT
from tests.support.play import collect

MODEL = ROOT / "mcore_mas" / "pipeline" / "scaffold" / "models" / "tiny"
STEPS = 16
GROUP_SIZE = 8
TASKS_PER_STEP = 4
_MAX_LENGTH = 2048
# Overrides of a config, and options of the tasks, by team.
TRAININGS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "verifiers": ({"env": {"options": POEMS}}, POEMS),
    "openenv": (
        {"env": {"options": ECHO}, "agents": {"player": {"role": "program_agent"}}},
        {},
    ),
}


def make_config(team: str, results: Path) -> tuple[RunConfig, list[Task]]:
    """Return the config of a team's training, and its tasks."""
    sections, task_options = TRAININGS[team]
    [agent] = {"verifiers": ["agent"], "openenv": ["player"]}[team]
    values = resolve(
        [
            "~experiment",
            f"team={team}",
            f"results={results}",
            "+data={generator: arithmetic, train: 1, validation: 1, test: 1}",
            f"policy_defaults={{model: {MODEL}, lr: 2e-3}}",
            f"+agents.{agent}.max_tokens=200",
            f"+trainer={{steps: {STEPS}, tasks_per_step: {TASKS_PER_STEP}, group_size: {GROUP_SIZE}}}",
            "+evaluation={}",
        ],
        sections={"run": "published", **sections},
    )
    config = RunConfig.from_values(values, team)
    tasks = GENERATORS[team].tasks(1, {"train": TASKS_PER_STEP}, **task_options)
    return config, tasks


async def train(team: str) -> tuple[list[float], list[float]]:
    """Train a team; return the rewards of the trajectories of the first and of the last two steps."""
    with tempfile.TemporaryDirectory() as folder:
        init_process_groups(rank=0, threads=1)
        try:
            rewards = await _train(*make_config(team, Path(folder)))
        finally:
            destroy_process_groups()
    return rewards[0] + rewards[1], rewards[-2] + rewards[-1]


async def _train(config: RunConfig, tasks: Sequence[Task]) -> list[list[float]]:
    [policy] = config.policies
    trainer = MegatronTrainer(
        TrainerSpec(model=str(MODEL), lr=2e-3, objective=Objective(loss="ppo_clip"))
    )
    engine = LocalEngine(
        EmbeddedEngine.from_folder(
            str(MODEL), max_length=_MAX_LENGTH, rows=TASKS_PER_STEP * GROUP_SIZE
        )
    )
    client = EngineClient(engine=engine, renderer=Renderer(str(MODEL)))
    team = build_team(config.agents, {policy: client})
    allocate = build_allocator(config.reward, config.agents)
    rewards = []
    for step in range(STEPS):
        groups = await collect(
            tasks,
            team,
            build_env(config.env),
            config.orchestra.call,
            group_size=GROUP_SIZE,
            seed=config.seed,
            step=step,
        )
        rewards.append(_rewards_of(groups))
        print(
            f"step {step}: mean reward {fmean(rewards[-1]):.3f} of {len(rewards[-1])} trajectories",
            flush=True,
        )
        samples = add_advantages(
            to_samples([allocate(group) for group in groups]),
            dict.fromkeys(config.agents, config.advantage),
        )
        weights = dict.fromkeys(config.agents, 1.0)
        samples = weigh(samples, weights, config.loss.aggregation, config.loss.norm)
        trainer.update(pack(samples, 4096))
        await engine.load_weights(trainer.model.weights(), step + 1)
    return rewards


def _rewards_of(groups: Sequence[Group]) -> list[float]:
    """Return the outcomes of trajectories, without those that failed and do not train."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [
        trajectory.outcome for trajectory in trajectories if trajectory.status is not Status.FAILED
    ]
