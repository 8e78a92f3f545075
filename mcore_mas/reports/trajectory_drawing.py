"""Games as they were played, one SVG picture for each trajectory of a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rollout.environments.games import GAMES
from rollout.environments.games.game import BadPuzzle
from rollout.environments.games.picture import picture
from rollout.orchestras.game_team import parse_decided, parse_listed
from rollout.records.trajectory import RecordError, Task, Trajectory, read_tasks, read_trajectories


def draw(file: Path, out: Path, *, index: int = 0, trajectory_id: str | None = None) -> list[Path]:
    """Write pictures of the trajectories of `file`, and say which.

    Args:
        out: a file named .svg for the `index`-th trajectory or the one with `trajectory_id`; else a folder for all.

    Raises:
        RecordError: the file is no file of trajectories, lies in no run with tasks, or is not of games.
    """
    if out.suffix not in ("", ".svg"):
        raise RecordError(f"{out}: pictures are SVG; name a file that ends in .svg, or a folder")
    tasks = {task.id: task for task in _tasks(file)}
    trajectories = read_trajectories(file)
    if out.suffix:
        chosen = (
            [t for t in trajectories if t.id == trajectory_id] if trajectory_id else trajectories[index : index + 1]
        )
        if not chosen:
            raise RecordError(f"{file}: no trajectory {trajectory_id or index}; it holds {len(trajectories)}")
        targets = {out: chosen[0]}
    else:
        targets = {out / file_name(t): t for t in trajectories}
    for path, trajectory in targets.items():
        drawing = picture(_task(file, trajectory, tasks), actions_of(trajectory))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawing, encoding="utf-8")
    return list(targets)


def drawing(task: Task, trajectory: Trajectory) -> str | None:
    """The picture of a trajectory of `task`; None of what is no game."""
    if task.env not in GAMES:
        return None
    try:
        return picture(task, actions_of(trajectory))
    except BadPuzzle:  # nobody could play it either
        return None


def file_name(trajectory: Trajectory) -> str:
    """Of its picture."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', trajectory.id)}.svg"


def actions_of(trajectory: Trajectory) -> list[str]:
    """What was done in each step of a game, "" where nothing was.

    That is what the last turn before the step decided, or what the program that it wrote printed.
    """
    last = {turn.round: turn for turn in trajectory.path}
    printed = {
        (event.node, event.after_turn): "" if event.failed else parse_listed(event.result) for event in trajectory.tools
    }
    done = []
    for _, turn in sorted(last.items()):
        decided = printed.get((turn.node, turn.index), parse_decided(turn.text))
        done.append((decided or "") if turn.valid else "")
    return done


def _task(file: Path, trajectory: Trajectory, tasks: dict[str, Task]) -> Task:
    task = tasks.get(trajectory.task_id)
    if task is None or task.env not in GAMES:
        what = "is not among the run's tasks" if task is None else f"is played in env '{task.env}'"
        raise RecordError(f"{file}: task {trajectory.task_id} {what}; pictures are of {', '.join(GAMES)}")
    return task


def _tasks(file: Path) -> Sequence[Task]:
    """The tasks of the run that a file of trajectories lies in."""
    folder = next((parent / "tasks" for parent in file.resolve().parents if (parent / "tasks").is_dir()), None)
    if folder is None:
        raise RecordError(f"{file}: in no run's folder, where the tasks to draw are under tasks/")
    return [task for path in sorted(folder.glob("*.parquet")) for task in read_tasks(path)]
