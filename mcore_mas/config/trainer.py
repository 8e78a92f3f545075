"""Trainer section of a config: steps, groups, trees of turns, and the staleness of async rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.base.options import Section


class AlternateConfig(Section):
    """Policies trained in turn, each while the others play with the weights they have."""

    order: tuple[str, ...] = Field(min_length=2)  # policies
    steps: int = Field(1, ge=1)  # of each before the next

    def in_turn(self, step: int) -> str:
        """The policy that is trained in `step`."""
        return self.order[step // self.steps % len(self.order)]


class BranchingConfig(Section):
    """Tree sampling: branches from every state, scored, of which one goes on (AT-GRPO)."""

    width: int = Field(ge=1)  # K branches
    alpha: float = 1.0  # weight of the team's reward in a branch's score
    select: Literal["greedy", "sampled"] = "greedy"


class TrainerConfig(Section):
    """The shape of a training run."""

    steps: int = Field(ge=1)
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)  # trajectories per task, trees with branching
    branching: BranchingConfig | None = None
    oversample: float = Field(1.0, ge=1)  # times group_size that are started; the slowest are given up
    staleness: int = Field(0, ge=0)  # steps that collection may be ahead of training; 0 trains what it samples
    updates_per_step: int = Field(1, ge=1)  # optimizer steps, each on its share of a step's samples
    alternate: AlternateConfig | None = None  # None: every policy is trained in every step
    microbatch_tokens: int = Field(4096, ge=1)
    checkpoint_every: int = Field(10, ge=1)  # steps
    keep_checkpoints: int = Field(2, ge=1)  # the newest
    keep_best: int = Field(0, ge=0)  # also those with the highest validation accuracy; each is saved when it is found
    final: Literal["last", "best"] = "last"  # which weights are written as the finished policies
    validate_every: int = Field(10, ge=1)  # steps
    validation_samples: int = Field(1, ge=1)  # trajectories per validation task
    max_advantage: float | None = Field(1e3, gt=0)  # |A| beyond which the run stops; None: never
    signal_within: int | None = Field(10, ge=1)  # steps from the start within which a turn must have an advantage
    logprob_tolerance: float = Field(1e-4, gt=0)  # nats between engine and trainer on fresh samples; 1e-4 suits float32

    @model_validator(mode="after")
    def _best_is_kept(self) -> TrainerConfig:
        if self.final == "best" and not self.keep_best:
            raise ValueError("final 'best' needs a kept best: set trainer.keep_best to 1 or more")
        return self
