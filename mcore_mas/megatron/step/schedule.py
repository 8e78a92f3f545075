"""Learning rate and weight decay of each update."""

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_mas.megatron.spec import TrainerSpec


class LearningRateSchedule:
    """Learning rate of an optimizer as a function of the number of updates alone.

    It has no state, so a resumed run has none to restore.
    """

    def __init__(self, optimizer: Any, spec: TrainerSpec) -> None:
        """Prepare Megatron's scheduler.

        Args:
            optimizer: result of `make_optimizer`, or any object with its `param_groups`.
        """
        self._warmup_steps = spec.warmup_steps
        self._scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=spec.lr,
            min_lr=spec.min_lr,
            lr_warmup_steps=spec.warmup_steps,
            # Megatron asserts that this exceeds the warm-up, even for a constant rate, which does
            # not use it.
            lr_decay_steps=max(spec.decay_steps or 0, spec.warmup_steps + 1),
            lr_decay_style=spec.schedule,
            start_wd=spec.weight_decay,
            end_wd=spec.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, updates: int, scale: float = 1.0) -> float:
        """Set the learning rate and weight decay of one update; return its learning rate.

        During the warm-up the rate rises by lr / warmup_steps with each update. The first update
        has lr / warmup_steps, so that no update has a rate of 0; the last one of the warm-up and
        the first one after it have lr. Then the rate follows `schedule` to min_lr at `decay_steps`.
        The weight decay is constant; Megatron multiplies it by 0 for parameters with one dimension.

        Args:
            updates: number of updates before this one.
            scale: factor of this update's rate alone.
        """
        in_warmup = updates < self._warmup_steps
        self._scheduler.num_steps = updates + 1 if in_warmup else updates
        self._scheduler.step(0)
        if scale != 1.0:
            for group in self._scheduler.optimizer.param_groups:
                group["lr"] *= scale
        lr: float = self._scheduler.get_lr({})
        return lr * scale
