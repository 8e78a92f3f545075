"""Everything a training step touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.kl import AdaptiveKL
from mcore_mas.packing.pack import pack
from mcore_mas.training.schedule import Schedule
from rollout.base.watchdog import Watchdog
from rollout.environments.protocol import Env
from rollout.records.trajectory import Group, Task
from rollout.rewards.coach import Coach
from rollout.teams.collect import Orchestra
from rollout.teams.team import Team

if TYPE_CHECKING:
    from mcore_mas.megatron.batch import Microbatch
    from mcore_mas.megatron.step.trainer_group import TrainerGroup
    from mcore_mas.training.checkpoint import Checkpoints
    from mcore_mas.training.weight_sync import WeightSync
    from rollout.engines.protocol import TrainedEngine
    from rollout.teams.external import RemoteClient


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says what, where, what to do."""


class Stopped(Exception):
    """Training ended early because it was told to, with all that was learned saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's team and world, its trainers and engines, and its places on disk."""

    config: RunConfig
    team: Team
    orchestra: Orchestra
    make_env: Callable[[Task], Env]
    schedule: Schedule
    validation: tuple[Task, ...]
    trainers: Mapping[str, TrainerGroup]  # by policy
    critics: Mapping[str, TrainerGroup]  # by policy, of those that have one
    engines: Mapping[str, TrainedEngine]  # by policy with a model
    remotes: Mapping[str, RemoteClient]  # by policy without a model
    coach: Coach | None  # who scores turns before rewards are allocated
    kl: dict[str, AdaptiveKL]  # by policy, of those whose coefficient adapts; each step replaces its controller
    checkpoints: Checkpoints
    trajectories: Path  # folder of what was collected, a file per step
    models: Path  # folder of the finished policies
    report: Callable[[int, Mapping[str, float]], None]  # told of every finished step
    tracking_run: str  # the tracker's run, saved with every checkpoint
    weight_sync: Mapping[str, WeightSync] = field(default_factory=dict)  # by policy that trains
    note: Callable[[str], None] = lambda text: None  # told of what is worth a line
    watchdog: Watchdog | None = None  # sees everything that is played
    trace: Callable[[Sequence[Group], Sequence[Sample]], None] = lambda groups, samples: None  # shown a step's

    def kl_coef(self, policy: str) -> float:
        """The factor of the KL term or penalty of `policy` in this step."""
        return self.kl[policy].coefficient if policy in self.kl else self.config.loss.kl.coef

    def packed(self, trainer: TrainerGroup, samples: Sequence[Sample]) -> list[Microbatch]:
        """The samples as micro-batches for that trainer."""
        return pack(samples, self.config.trainer.microbatch_tokens, trainer.cost_model)
