"""Trainings on simulated engines that are killed on a virtual clock and started again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_mas.training.collected_steps import CollectedSteps
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.weight_sync import WeightSync
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Trajectory
from tests.support.simulated import (
    TOKEN_S,
    SimulatedEngine,
    engines_of,
    handed_over,
    simulated_run,
)
from tests.support.virtual_time import run_virtually

STEPS = 6
SETTINGS = [
    "trainer.tasks_per_step=4",
    "trainer.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    *(f"+policies.{policy}.max_in_flight=8" for policy in ("solver", "verifier")),
]


class CountingEngine(SimulatedEngine):
    """Simulated engine that counts its tokens.

    Attributes:
        sampled: tokens of whole replies.
        lost: tokens of replies that were cancelled.
    """

    sampled = 0
    lost = 0

    async def stream(self, prompt_ids: Any, sampling: Any, on_tokens: Any) -> Any:
        began = asyncio.get_running_loop().time()
        try:
            completion = await super().stream(prompt_ids, sampling, on_tokens)
        except asyncio.CancelledError:
            self.lost += round((asyncio.get_running_loop().time() - began) / TOKEN_S)
            raise
        self.sampled += len(completion.token_ids)
        return completion


def restarted_session(
    folder: Path, staleness: int, *overrides: str, update_s: float = 20.0, recipe: str = ""
) -> TrainingSession:
    """Return the session of a start, which continues from the newest checkpoint or begins at step 0.

    Args:
        update_s: virtual seconds of an update.
        recipe: digest of the recipe that collected steps must have.
    """
    settings = [*SETTINGS, f"+trainer.staleness={staleness}", *overrides]
    run = simulated_run(folder, *settings, seconds=lambda _: update_s, engine_class=CountingEngine)

    checkpoint = run.checkpoints.recover_newest(print)
    first_step = checkpoint.step if checkpoint else 0
    collected = CollectedSteps(folder, recipe=recipe, first_step=first_step)
    run = replace(run, rollouts=replace(run.rollouts, collected=collected))
    if checkpoint is None:
        return run

    for engine in engines_of(run).values():
        asyncio.run(engine.commit_update(handed_over(checkpoint.step)))
        engine._updates = [(0.0, checkpoint.step)]
    versions = checkpoint.state["versions"]
    syncs = {
        name: WeightSync(run.groups[name], engine, versions=versions[name])  # type: ignore[arg-type]
        for name, engine in engines_of(run).items()
    }
    return replace(run, weight_sync=syncs)


def train(run: TrainingSession, until_s: float = 1e9) -> bool:
    """Train until the end, or cancel the training at a virtual time; return True if it ended."""
    checkpoint = run.checkpoints.recover_newest(print)
    first_step = checkpoint.step if checkpoint else 0

    async def main() -> bool:
        training = asyncio.ensure_future(train_steps(run, first_step))
        done, _ = await asyncio.wait({training}, timeout=until_s)
        if done:
            training.result()
        else:
            training.cancel()
            await asyncio.wait({training})
        return bool(done)

    return run_virtually(main())


def trajectories_of(folder: Path, steps: int = STEPS) -> list[Trajectory]:
    """Return the trajectories of all steps of a run."""
    trajectories: list[Trajectory] = []
    for step in range(steps):
        trajectories += read_trajectories(folder / "trajectories" / f"step_{step:06d}.parquet")
    return trajectories


def token_count(trajectories: list[Trajectory]) -> int:
    """Return the number of sampled tokens in trajectories."""
    count = 0
    for trajectory in trajectories:
        count += sum(len(turn.completion_ids) for turn in trajectory.turns)
    return count


def sampled_by(*runs: TrainingSession) -> int:
    """Return the number of tokens of whole replies that the engines of these sessions sampled."""
    count = 0
    for run in runs:
        count += sum(engine.sampled for engine in engines_of(run).values())
    return count
