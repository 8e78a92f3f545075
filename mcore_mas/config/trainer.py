"""Section of a config about the training run: steps, tasks, mini-batches, checkpoints and validation."""

import math
from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from mcore_mas.equations.agreement import Figure
from rollout.base.section import Section
from rollout.teams.replays import Replays
from rollout.teams.tree import Branching


class AlternateConfig(Section):
    """Training of policies in turn; the others play with the weights that they have."""

    # Policies in the order in which they are trained; after the last one the first one comes again.
    order: tuple[str, ...] = Field(min_length=2)
    # Training steps of a policy in a row.
    steps: int = Field(1, ge=1)


class WatchConfig(Section):
    """Conditions of the log's warning that one agent has nearly the whole gradient of a shared policy."""

    # Share of the policy's gradient above which an agent is reported; None: never.
    share: float | None = Field(0.9, gt=0, lt=1)
    # Training steps in a row in which the share must be above the bound.
    steps: int = Field(10, ge=1)


class TrainerConfig(Section):
    """Steps, samples and updates of a training run; its checkpoints and validations, and when it stops early."""

    steps: int = Field(ge=1)
    tasks_per_step: int = Field(ge=1)
    # Trajectories per task; with branching, trees per task.
    group_size: int = Field(ge=1)
    branching: Branching | None = None
    # Sample alternatives of turns, which the advantage c3 compares, and replay each to its outcome; None: no
    # alternatives are sampled.
    replays: Replays | None = None
    # Multiple of group_size that is started; the slowest trajectories of a task are cancelled.
    oversample: float = Field(1.0, ge=1)
    # Weight syncs by which the turns of a policy may be behind when they train; 0: train on replies of current weights.
    staleness: int = Field(0, ge=0)
    # Optimizer steps per pass over a training step's samples, each on the samples of its share of the tasks.
    updates_per_step: int = Field(1, ge=1)
    # Turns per optimizer step, drawn at random, in place of updates_per_step.
    minibatch: int | None = Field(None, ge=1)
    # Passes over a training step's samples (PPO's epochs).
    passes: int = Field(1, ge=1)
    # Train the policies in turn; None: every policy is trained in every step.
    alternate: AlternateConfig | None = None
    # Maximum number of tokens in a micro-batch; a prefix that several sequences share counts once.
    microbatch_tokens: int = Field(4096, ge=1)

    # Training steps between two checkpoints.
    checkpoint_every: int = Field(10, ge=1)
    # Newest checkpoints that are kept.
    keep_checkpoints: int = Field(2, ge=1)
    # Newest steps whose trajectories are kept, besides those since the newest checkpoint; None: all.
    keep_trajectories: int | None = Field(None, ge=1)
    # Checkpoints with the highest validation accuracy that are kept too; each is saved right after its validation.
    # None: one if there are validation tasks.
    keep_best: int | None = Field(None, ge=0)
    # Weights that are written as the finished policies: those after the last step, or those of the checkpoint with
    # the highest validation accuracy (see keep_best).
    final: Literal["last", "best"] = "last"
    # Use of the run's checkpoints if the settings that decide what is learnt, an input or the code have changed since.
    # "same": the run is refused; "changed": it is forked, and continues from its newest checkpoint.
    resume: Literal["same", "changed"] = "same"

    # Training steps between two validations.
    validate_every: int = Field(10, ge=1)
    # Trajectories per validation task.
    validation_samples: int = Field(1, ge=1)

    # Absolute advantage above which the run stops; None: never.
    max_advantage: float | None = Field(1e3, gt=0)
    # N: the run stops if no turn of its first N steps has an advantage other than 0, or if a policy has no
    # finite gradient in N steps in a row. None: it does not stop for these reasons.
    signal_within: int | None = Field(10, ge=1)
    watch: WatchConfig = WatchConfig()
    # Bounds, in nats, of figures of the gap between the log-probabilities of engine and trainer, such as its mean. The
    # run stops above a bound. A figure that is not given has the default bound of the precision, if there is one.
    agreement: dict[Figure, PositiveFloat] = Field(default_factory=dict)

    @property
    def surplus(self) -> int:
        """Number of trajectories of a task that are started beyond `group_size`."""
        # The tolerance makes 10 * (1.1 - 1.0) one trajectory although it is above 1 in binary.
        return math.ceil(self.group_size * (self.oversample - 1.0) - 1e-9)

    @property
    def trajectories_per_step(self) -> int:
        """Number of trajectories that a step starts, including the surplus; with branching, number of trees.

        Greedy trajectories and replays are not counted. If a filter resamples, each further batch of tasks starts
        as many again.
        """
        return self.tasks_per_step * (self.group_size + self.surplus)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Refuse two ways to split a step's samples, more parts than tasks, and a best checkpoint that is not kept."""
        if self.minibatch is not None and self.updates_per_step > 1:
            raise ValueError(
                "minibatch and updates_per_step both split a step's samples; leave one of them out"
            )
        if self.final == "best" and self.keep_best == 0:
            raise ValueError(
                "final 'best' needs a checkpoint that is kept for its accuracy: set trainer.keep_best to 1 or more"
            )
        if self.updates_per_step > self.tasks_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} is more than tasks_per_step {self.tasks_per_step}, and no "
                "task is split; lower it, or set minibatch in its place"
            )
        return self
