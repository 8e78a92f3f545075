"""Runs without trainers, whose agents' replies are scripted."""

from dataclasses import replace
from pathlib import Path

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.task_schedule import TaskSchedule
from rollout.records.trajectory import Task
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.simulated import Log, make_session, with_engines


class Bytes:
    """Renderer whose tokens are UTF-8 bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(m.content for m in messages).encode())

    def decode(self, token_ids):
        return bytes(token for token in token_ids if token).decode()


def make_run(tmp_path: Path, script: Script, *overrides: str) -> TrainingSession:
    """Return a run of the math team with scripted replies; the answer of task n is n."""
    settings = [
        "trainer.tasks_per_step=2",
        "trainer.group_size=2",
        "orchestra.options.max_loops=1",
        *overrides,
    ]
    values = resolve(["experiment=demo_math", f"results={tmp_path}", *settings])
    config = RunConfig.from_values(values, "test")
    tasks = [
        Task(
            id=str(number),
            prompt=f"task {number}",
            answers=(str(number),),
            env="math",
            source="s",
            split="train",
        )
        for number in range(8)
    ]
    engines = dict.fromkeys(config.policies, ScriptedEngine(script))
    session = with_engines(
        make_session(config, tmp_path, tasks, engines, {}, Log()), engines, Bytes()
    )
    schedule = TaskSchedule(tasks, 2, seed=1)
    return replace(session, rollouts=replace(session.rollouts, schedule=schedule))


def box(answer: object) -> bytes:
    """Return the reply that gives this answer."""
    return b"\\boxed{%s}\0" % str(answer).encode()


def task_of(prompt) -> int:
    """Return the number of the task in a prompt."""
    return int(bytes(prompt).decode().rpartition("task ")[2].split()[0])
