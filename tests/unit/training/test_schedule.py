"""Task order is a function of seed and step alone."""

import pytest

from mcore_mas.training.async_rollout import Schedule
from rollout.records.trajectory import Task


def tasks(n: int) -> list[Task]:
    return [
        Task(id=str(i), prompt="", answers=("",), env="math", source="s", split="train")
        for i in range(n)
    ]


def ids(schedule: Schedule, step: int) -> list[str]:
    return [task.id for task in schedule.batch(step)]


def test_an_epoch_shows_every_task_once_and_the_next_in_another_order() -> None:
    schedule = Schedule(tasks(12), 4, seed=1)
    first = [i for step in range(3) for i in ids(schedule, step)]
    second = [i for step in range(3, 6) for i in ids(schedule, step)]
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(12))
    assert first != second


def test_a_restarted_schedule_goes_on_where_it_was() -> None:
    assert ids(Schedule(tasks(12), 4, seed=1), 5) == ids(Schedule(tasks(12), 4, seed=1), 5)
    assert ids(Schedule(tasks(12), 4, seed=1), 5) != ids(Schedule(tasks(12), 4, seed=2), 5)


def test_too_few_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 training tasks, but trainer.tasks_per_step is 4"):
        Schedule(tasks(3), 4, seed=1)


def test_further_batches_of_a_step_repeat_no_task() -> None:
    schedule = Schedule(tasks(12), 4, seed=1)
    more = [[task.id for task in schedule.more(0, number)] for number in range(3)]
    assert sorted(ids(schedule, 0) + more[0] + more[1]) == sorted(str(i) for i in range(12))
    assert more[2] == []
    assert [task.id for task in Schedule(tasks(12), 4, seed=1).more(0, 0)] == more[0]
    assert [task.id for task in schedule.more(3, 0)] != more[0]
