"""`trainer.keep_trajectories`: old steps' trajectories go, and those that a run may go on with stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mcore_mas.training.loop import train_steps
from tests.unit.training.test_stopping import stuck


@pytest.mark.parametrize(
    ("overrides", "stay"),
    [
        ((), [0, 1, 2, 3]),
        (
            ("+trainer.keep_trajectories=1", "trainer.checkpoint_every=2"),
            [2, 3],
        ),  # a checkpoint of two steps is there
        (("+trainer.keep_trajectories=3", "trainer.checkpoint_every=1"), [1, 2, 3]),
        (
            ("+trainer.keep_trajectories=1", "trainer.checkpoint_every=9"),
            [0, 1, 2, 3],
        ),  # there is none to go on from
    ],
)
def test_the_newest_steps_stay_and_those_since_the_checkpoint(
    tmp_path: Path, overrides: tuple[str, ...], stay: list[int]
) -> None:
    run = stuck(tmp_path, 1000, [], *overrides)
    asyncio.run(train_steps(run, 0))
    files = sorted(file.name for file in run.rollouts.collected.folder.iterdir())
    assert files == [f"step_{step:06d}.parquet" for step in stay]
