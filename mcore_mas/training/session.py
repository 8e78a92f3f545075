"""A training session: the few parts that a training step works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_mas.training.credit_watch import CreditWatch
from mcore_mas.training.stopping import StopSignal

if TYPE_CHECKING:
    from mcore_mas.config.run import RunConfig
    from mcore_mas.megatron.step.trainer_group import TrainerGroup
    from mcore_mas.training.async_rollout import AsyncRollouts
    from mcore_mas.training.checkpoint import Checkpoints
    from mcore_mas.training.logbook import Logbook
    from mcore_mas.training.policy_trainer import PolicyTrainer
    from mcore_mas.training.weight_sync import Memory, WeightSync


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
    credit_watch: CreditWatch = field(default_factory=CreditWatch)

    @property
    def groups(self) -> dict[str, TrainerGroup]:
        """All trainers and critics, by the folder that they have in a checkpoint."""
        return {name: group for trainer in self.trainers.values() for name, group in trainer.groups.items()}

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after a step, and traces some of what it played."""
        trainer = self.config.trainer
        return step + 1 == trainer.steps or (step + 1) % trainer.validate_every == 0
