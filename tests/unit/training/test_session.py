"""Loading of the weights of a session."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mcore_mas.runtime.checkpoint import Checkpoint
from mcore_mas.training.colocation import Colocation
from mcore_mas.training.session import load_weights
from mcore_mas.training.step import TrainingSession
from tests.support.sleepers import Sleeper


def load(checkpoint: Checkpoint | None) -> list[str]:
    """Load the weights of a run whose engine sleeps during training; return the log."""
    log: list[str] = []

    async def record(line: str) -> None:
        log.append(line)

    engines: Any = {"learner": Sleeper("engine", log)}
    trainers: Any = [Sleeper("trainer", log)]
    group = SimpleNamespace(
        ready=lambda: record("trainer loads its model"),
        restore=lambda folder: record(f"trainer restores {folder}"),
    )
    sync = SimpleNamespace(push=lambda version: record(f"sync pushes {version}"))
    session = SimpleNamespace(
        config=SimpleNamespace(
            engine=SimpleNamespace(sleep=True),
            policies={"learner": SimpleNamespace(lora=None)},
        ),
        groups={"learner": group},
        weight_sync={"learner": sync},
        memory=Colocation(engines, trainers, sleeps=True),
    )
    loading = load_weights(cast("TrainingSession", session), checkpoint, engines_may_be_newer=False)
    asyncio.run(loading)
    return log


def test_engines_of_a_run_that_starts_have_the_weights_already() -> None:
    assert load(None) == ["trainer loads its model"]


def test_engines_of_a_resumed_run_start_while_the_trainers_are_offloaded() -> None:
    """A server starts at its first request, even one that makes it sleep, and takes all memory that is free."""
    checkpoint = Checkpoint(folder=Path("checkpoint"), step=3, state={}, metric=None)
    assert load(checkpoint) == [
        "trainer loads its model",
        "trainer sleeps",
        "engine wakes kv_cache",
        "engine sleeps weights+kv_cache",
        "trainer wakes",
        "trainer restores checkpoint/learner",
        "sync pushes 3",
    ]
