"""Task schedule: the tasks of a step are a function of seed and step."""

import pytest

from mcore_mas.training.task_schedule import TaskSchedule
from rollout.records.trajectory import Task


def make_tasks(count: int) -> list[Task]:
    return [
        Task(id=str(i), prompt="", answers=("",), env="math", source="s", split="train")
        for i in range(count)
    ]


def make_schedule(seed: int = 1) -> TaskSchedule:
    return TaskSchedule(make_tasks(12), 4, seed=seed)


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_an_epoch_has_every_task_once_and_the_next_another_order() -> None:
    schedule = make_schedule()
    first = [task for step in range(3) for task in ids(schedule.batch(step))]
    second = [task for step in range(3, 6) for task in ids(schedule.batch(step))]
    assert sorted(first) == sorted(second) == sorted(ids(make_tasks(12)))
    assert first != second


def test_a_restarted_schedule_goes_on_where_it_was() -> None:
    assert make_schedule().batch(5) == make_schedule().batch(5)
    assert make_schedule(seed=1).batch(5) != make_schedule(seed=2).batch(5)


def test_fewer_tasks_than_a_step_needs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 training tasks, but trainer.tasks_per_step is 4"):
        TaskSchedule(make_tasks(3), 4, seed=1)


def test_extra_batches_of_a_step_repeat_no_task() -> None:
    schedule = make_schedule()
    extra = [ids(schedule.extra_batch(0, number)) for number in range(3)]
    assert sorted(ids(schedule.batch(0)) + extra[0] + extra[1]) == sorted(ids(make_tasks(12)))
    assert extra[2] == []
    assert ids(make_schedule().extra_batch(0, 0)) == extra[0]
    assert ids(schedule.extra_batch(3, 0)) != extra[0]
