"""The learning rate and weight decay of every update, by Megatron's scheduler and without its state."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_mas.megatron.spec import TrainerSpec


class Rates:
    """Sets an optimizer's rates from the number of updates alone: a run that resumes has nothing to restore."""

    def __init__(self, optimizer: Any, spec: TrainerSpec) -> None:
        """Drive `optimizer`, as `get_megatron_optimizer` gives it or anything with its `param_groups`."""
        self._warmup = spec.warmup_steps
        self._megatron = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=spec.lr,
            min_lr=spec.min_lr,
            lr_warmup_steps=spec.warmup_steps,
            # Megatron asserts so much, though a constant rate reads nothing of it
            lr_decay_steps=max(spec.decay_steps or 0, spec.warmup_steps + 1),
            lr_decay_style=spec.schedule,
            start_wd=spec.weight_decay,
            end_wd=spec.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, updates: int) -> float:
        """Set and return the learning rate of the update that follows `updates` others.

        Warm-up rises by lr / warmup_steps, so that no update has a rate of 0, and its last has lr; so has the first
        after it, from which `schedule` falls to min_lr at decay_steps. Weight decay is 0 for what has one dimension.
        """
        self._megatron.num_steps = updates + 1 if updates < self._warmup else updates
        self._megatron.step(0)
        lr: float = self._megatron.get_lr({})
        return lr
