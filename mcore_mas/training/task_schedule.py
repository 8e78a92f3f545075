"""Schedule of training tasks: the tasks of every step, as a function of the seed."""

from collections.abc import Sequence
from functools import lru_cache

from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task


class TaskSchedule:
    """Tasks of each step, in a new random order every epoch; a restart gives the same."""

    def __init__(self, tasks: Sequence[Task], per_step: int, seed: int) -> None:
        """Store the tasks.

        Args:
            tasks: training tasks.
            per_step: number of tasks in a step.
            seed: seed of the random orders.

        Raises:
            ValueError: there are fewer tasks than a step needs.
        """
        if len(tasks) < per_step:
            raise ValueError(
                f"{len(tasks)} training tasks, but trainer.tasks_per_step is {per_step}; add tasks"
            )
        self._tasks = tasks
        self._per_step = per_step
        self._seed = seed
        # A step and the steps that are collected ahead of it are usually in at most two epochs.
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def batch(self, step: int) -> list[Task]:
        """Return the tasks of a step.

        The last tasks of an epoch that do not fill a step are left out of this epoch.
        """
        steps_per_epoch = len(self._tasks) // self._per_step
        epoch, index = divmod(step, steps_per_epoch)
        return self._order(epoch)[index * self._per_step : (index + 1) * self._per_step]

    def extra_batch(self, step: int, number: int) -> list[Task]:
        """Return further tasks for a step whose filter rejects some, without repeating any.

        Args:
            step: number of the step.
            number: number of the extra batch, from 0.

        Returns:
            The tasks; [] if all tasks are in earlier batches of the step.
        """
        used = {task.id for task in self.batch(step)}
        others = [task for task in self._tasks if task.id not in used]
        others.sort(key=lambda task: derive_seed(self._seed, "more", step, task.id))
        return others[number * self._per_step : (number + 1) * self._per_step]

    def _order_of_epoch(self, epoch: int) -> list[Task]:
        return sorted(
            self._tasks, key=lambda task: derive_seed(self._seed, "order", epoch, task.id)
        )
