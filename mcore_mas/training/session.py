"""A training session: the few parts that a training step works with."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.base.task_group import cancel_tasks

if TYPE_CHECKING:
    from mcore_mas.config.run import RunConfig
    from mcore_mas.megatron.step.trainer_group import TrainerGroup
    from mcore_mas.training.async_rollout import AsyncRollouts
    from mcore_mas.training.checkpoint import Checkpoints
    from mcore_mas.training.logbook import Logbook
    from mcore_mas.training.policy_trainer import PolicyTrainer
    from mcore_mas.training.weight_sync import Memory, WeightSync

_T = TypeVar("_T")


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


class Stopped(Exception):
    """Training ended early because it was told to, with all that was learned saved."""


class Abandoned(Exception):
    """What was under way is done again by the next start: the run was told to stop."""


class StopSignal:
    """SIGTERM or SIGURG: what can be done again is abandoned, all else is finished first."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def listen(self) -> None:
        """Take both signals in the running event loop."""
        for number in (signal.SIGTERM, signal.SIGURG):  # the latter can be sent to all of a job: others ignore it
            asyncio.get_running_loop().add_signal_handler(number, self._told.set)

    @property
    def came(self) -> bool:
        """Whether the run was told to stop."""
        return self._told.is_set()

    async def unless(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` comes to.

        Raises:
            Abandoned: the run was told to stop first, and `work` has been cancelled.
        """
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Abandoned
            return working.result()
        finally:
            await cancel_tasks([working, waiting])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSession:
    """One run's parts, as `train` brings them up."""

    config: RunConfig
    rollouts: AsyncRollouts
    trainers: Mapping[str, PolicyTrainer]  # by policy that trains, as are its weights' ways to its engine:
    weight_sync: Mapping[str, WeightSync]
    memory: Memory
    checkpoints: Checkpoints
    logbook: Logbook
    stop: StopSignal = field(default_factory=StopSignal)

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """All trainers and critics, by the folder that they have in a checkpoint."""
        return {name: group for trainer in self.trainers.values() for name, group in trainer.groups.items()}

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after a step, and traces some of what it played."""
        trainer = self.config.trainer
        return step + 1 == trainer.steps or (step + 1) % trainer.validate_every == 0
