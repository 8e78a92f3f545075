"""The page of a suite's runs: durations of jobs, differences in settings, and conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from mcore_mas.reports.game_pictures import draw_trajectory
from mcore_mas.reports.page_templates import embed_page, render_page
from mcore_mas.reports.run_differences import config_differences
from mcore_mas.reports.run_states import collecting_problems, read_run_config
from mcore_mas.reports.task_texts import TaskText
from mcore_mas.reports.trajectory_page import trajectory_page
from rollout.base.files import write_text
from rollout.base.json_files import read_json_lines
from rollout.records.files import read_tasks, read_trajectories
from rollout.records.trajectory import Task, Trajectory

# Columns of the table of jobs, in this order; other jobs follow.
_JOBS = (
    "prepare_tasks",
    "make_base_model",
    "bootstrap",
    "evaluate_base",
    "train",
    "evaluate_trained",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownConversation:
    """A trajectory on the page of runs."""

    title: str
    frame: Markup  # a frame with the trajectory's own page
    picture: Markup  # of a game; empty for other environments


def write_runs_page(results: Path, runs: Sequence[str], out: Path) -> None:
    """Write the page of runs in a results folder.

    A part of a run that cannot be read is left out, and the page says why.
    """
    problems: dict[str, list[str]] = {run: [] for run in runs}
    seconds: dict[str, dict[str, float]] = {run: {} for run in runs}
    conversations: dict[str, list[ShownConversation]] = {}
    compared = []  # runs whose settings can be read
    for run in runs:
        with collecting_problems(problems[run]):
            seconds[run] = _job_seconds(results / run)
        with collecting_problems(problems[run]):
            read_run_config(results / run)
            compared.append(run)
        with collecting_problems(problems[run]):
            conversations[run] = list(_conversations(results / run))

    jobs = dict.fromkeys(_JOBS)
    for durations in seconds.values():
        jobs |= dict.fromkeys(durations)
    page = render_page(
        "runs.html.jinja",
        runs=runs,
        problems=problems,
        seconds=seconds,
        jobs=[job for job in jobs if any(job in durations for durations in seconds.values())],
        compared=compared,
        settings=config_differences(*(results / run for run in compared)),
        conversations=conversations,
    )
    write_text(out, page)


def _job_seconds(folder: Path) -> dict[str, float]:
    """Return the seconds that each finished job of a run took, by its name, such as `evaluate_base`.

    Snakemake writes them to a file for each job. A file without a duration is passed over.
    """
    seconds = {}
    for file in sorted((folder / "benchmarks").glob("*.jsonl")):
        rows = read_json_lines(file)[0] if file.is_file() else []
        duration = rows[-1].get("s") if rows else None
        if isinstance(duration, int | float):
            seconds[file.stem] = duration
    return seconds


def _conversations(folder: Path) -> Iterator[ShownConversation]:
    """Yield up to three conversations of a run's evaluations.

    The first two show the same task before and after training: the first task that only the trained
    team solves, or else the first task. The third shows the first other task that the trained team
    does not solve. A task is solved if its success is above 0. Conversations that the evaluations do
    not have are left out.
    """
    base = _first_samples(folder / "evaluation" / "base")
    trained = _first_samples(folder / "evaluation" / "trained")
    if not trained:
        return
    tasks = {task.id: task for task in read_tasks(folder / "tasks" / "test.parquet")}
    gained = [
        task
        for task, played in trained.items()
        if task in base and played.success > 0 and base[task].success <= 0
    ]
    shown_task = next(iter(gained or trained))
    unsolved = [
        played for task, played in trained.items() if played.success <= 0 and task != shown_task
    ]
    if shown_task in base:
        yield _show(base[shown_task], "before training", tasks)
    yield _show(trained[shown_task], "after training", tasks)
    if unsolved:
        yield _show(unsolved[0], "after training, not solved", tasks)


def _show(trajectory: Trajectory, title: str, tasks: dict[str, Task]) -> ShownConversation:
    picture = None
    text = None
    task = tasks.get(trajectory.task_id)
    if task is not None:
        picture = draw_trajectory(task, trajectory)
        text = TaskText(question=task.prompt, answers=task.answers)
    return ShownConversation(
        title=title,
        frame=embed_page(trajectory_page(trajectory, {}, task=text)),
        picture=Markup(picture or ""),  # noqa: S704 (the template of boards escapes signs)
    )


def _first_samples(folder: Path) -> dict[str, Trajectory]:
    """Return the first completed trajectory of each task in the first file of an evaluation, by task id."""
    files = sorted(folder.glob("part_*.parquet"))
    if not files:
        return {}
    samples: dict[str, Trajectory] = {}
    for trajectory in read_trajectories(files[0]):
        if not trajectory.error:
            samples.setdefault(trajectory.task_id, trajectory)
    return samples
