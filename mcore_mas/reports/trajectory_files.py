"""Files of trajectories: `select_trajectory` from a file, and the tasks and tools of the run that wrote it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rollout.base.yaml_files import read_yaml
from rollout.records.files import RecordError, read_tasks
from rollout.records.trajectory import Task, Trajectory

AgentTools = Mapping[str, Sequence[str]]  # names of each agent's tools


def find_agent_tools(file: Path) -> AgentTools:
    """Return the tools of the agents of the run that a file of trajectories lies in; {} if that is not known."""
    for folder in file.resolve().parents:
        if (folder / "config.yaml").is_file():
            try:
                agents = read_yaml(folder / "config.yaml")["agents"]
                return {name: list(agent["tools"]) for name, agent in agents.items()}
            except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
                return {}  # a trajectory without its tools is better than none
    return {}


def select_trajectory(
    file: Path, trajectories: Sequence[Trajectory], index: int, trajectory_id: str | None
) -> Trajectory:
    """Return the trajectory with an id, or without an id the one at an index.

    Args:
        file: file of the trajectories, for errors.
        trajectories: trajectories of the file.
        index: counted from 0.
        trajectory_id: takes precedence over `index`.

    Raises:
        RecordError: there is no such trajectory.
    """
    if trajectory_id is not None:
        for trajectory in trajectories:
            if trajectory.id == trajectory_id:
                return trajectory
        first = trajectories[0].id if trajectories else "none"
        raise RecordError(f"{file}: no trajectory '{trajectory_id}'; the first is '{first}'")
    if not 0 <= index < len(trajectories):
        raise RecordError(
            f"{file}: no trajectory {index + 1}; it holds {len(trajectories)}, counted from 1"
        )
    return trajectories[index]


def read_run_tasks(file: Path) -> list[Task]:
    """Read all tasks of the run that a file of trajectories lies in.

    Raises:
        RecordError: the file lies in no run's folder.
    """
    for folder in file.resolve().parents:
        if (folder / "tasks").is_dir():
            paths = sorted((folder / "tasks").glob("*.parquet"))
            return [task for path in paths for task in read_tasks(path)]
    raise RecordError(
        f"{file}: lies in no run's folder, so the tasks of its trajectories are not known; name "
        "a file in the folder where the run wrote it"
    )
