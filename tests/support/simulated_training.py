"""Trainings of `simulated_run` in virtual time, for tests of the schedule of steps."""

import asyncio

from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Trajectory
from tests.support.simulated import engines_of
from tests.support.virtual_time import run_virtually

# Two tasks with two trajectories each.
SMALL_STEPS = ("trainer.tasks_per_step=2", "trainer.group_size=2")


def train(session: TrainingSession, first: int = 0) -> None:
    """Take all steps from `first`; check that no task and no request is left over."""

    async def main() -> None:
        try:
            await train_steps(session, first)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert [engine.running for engine in engines_of(session).values()] == [0, 0]

    run_virtually(main())


def written_trajectories(session: TrainingSession, step: int) -> list[Trajectory]:
    """Return the trajectories in the file of a step."""
    return read_trajectories(session.rollouts.collected.path(step))
