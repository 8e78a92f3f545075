"""Files of collected steps and logs of unfinished collections, and their reuse after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_mas.credit.advantage_files import TurnAdvantages, advantage_path, write_advantages
from rollout.records.collection_log import CollectionLog
from rollout.records.files import (
    RecordError,
    read_trajectories,
    trajectory_metadata,
    write_trajectories,
)
from rollout.records.trajectory import Group, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedBatches:
    """Batches of a step that were collected and rewarded before a restart."""

    count: int = 0
    complete: bool = False  # the step needs no further batch
    trajectories: Mapping[str, Sequence[Trajectory]] = field(default_factory=dict)  # by task id

    def groups(self, tasks: Sequence[Task]) -> list[Group]:
        """Return the groups of a batch's tasks."""
        return [Group(task=task, trajectories=tuple(self.trajectories[task.id])) for task in tasks]

    def ends_with(self, batches: int) -> bool:
        """Return True if the step was complete after this number of batches."""
        return self.complete and batches == self.count

    def covers(self, batches: int, *, complete: bool) -> bool:
        """Return True if the step's file has the first `batches` batches, so it need not be written.

        If the step is complete, its file must say so, too.

        Args:
            batches: number of batches.
            complete: True if the step has no further batches.
        """
        return batches <= self.count and (self.complete or not complete)


class CollectedSteps:
    """Trajectories of a run by step, kept below its folder `train`.

    - `trajectories/step_000003.parquet`: rewarded trajectories of the step's batches so far.
    - `advantages/step_000003.parquet`: advantages that the step gave its turns.
    - `collection/step_000003.jsonl`: completed trajectories, and results of calls, of a step whose
      collection is under way (see `CollectionLog`).
    - `quarantine/`: a file for each quarantined trajectory (see `rollout.teams.quarantine`).
    - `greedy-quarantine/`: the same for greedy trajectories, whose files have the same names.

    A run that starts again from a checkpoint reuses trajectories and collections of the same recipe,
    if it reproduces the weights that sampled them. It reproduces those of the checkpoint, and those
    that follow from them by training on complete steps.
    """

    def __init__(self, train: Path, *, recipe: str = "", first_step: int = 0) -> None:
        """Remove files of trajectories whose weights this start does not reproduce.

        It reproduces the weights of `first_step`, and those after each complete step from there on.
        From the first step whose file is not complete, training may lead to other weights than before.

        Args:
            train: the run's folder `train`.
            recipe: digest of the run's identity (`identity_digest`).
            first_step: step that this start takes first, from its checkpoint.
        """
        self.folder = train / "trajectories"
        self.quarantine = train / "quarantine"
        self.greedy_quarantine = train / "greedy-quarantine"
        self._logs = train / "collection"
        self._recipe = recipe
        self._remove_newer_than(self._newest_version_from(first_step))

    def read(self, step: int) -> CollectedBatches:
        """Return the batches of a step that were collected before this start; none if its file cannot be used."""
        metadata = self._metadata(step)
        if not metadata:
            return CollectedBatches()

        trajectories: dict[str, list[Trajectory]] = {}
        for trajectory in read_trajectories(self.path(step)):
            trajectories.setdefault(trajectory.task_id, []).append(trajectory)
        return CollectedBatches(
            count=int(metadata["batches"]),
            complete=metadata["complete"] == "true",
            trajectories=trajectories,
        )

    def write(
        self, step: int, trajectories: Sequence[Trajectory], *, batches: int, complete: bool
    ) -> None:
        """Write the trajectories that have been collected for a step.

        Args:
            step: number of the step.
            trajectories: trajectories of the step's first `batches` batches, with rewards; after a
                failed reward also those of the next batch, without.
            batches: number of batches with rewards.
            complete: True if the step has no further batches.
        """
        versions = [turn.policy_version for trajectory in trajectories for turn in trajectory.turns]
        metadata = {
            "recipe": self._recipe,
            "batches": str(batches),
            "complete": "true" if complete else "false",
            "newest_version": str(max(versions, default=0)),
        }
        # Advantages of an earlier start may be those of other trajectories.
        advantage_path(self.path(step)).unlink(missing_ok=True)
        write_trajectories(self.path(step), trajectories, metadata)

    def write_advantages(self, step: int, advantages: TurnAdvantages) -> None:
        """Write the advantages of the turns of a step, whose trajectories are written already."""
        write_advantages(advantage_path(self.path(step)), advantages)

    def log(self, step: int) -> CollectionLog:
        """Open the log of a step's collection."""
        return CollectionLog(self._logs / f"step_{step:06d}.jsonl", self._recipe)

    def path(self, step: int) -> Path:
        """Return the path of a step's file of trajectories."""
        return self.folder / f"step_{step:06d}.parquet"

    def prune(self, before: int) -> None:
        """Remove the files of steps before this one."""
        for file in self.folder.glob("step_*.parquet"):
            if _step_of(file) < before:
                file.unlink(missing_ok=True)
                advantage_path(file).unlink(missing_ok=True)

    def _newest_version_from(self, first_step: int) -> int:
        """Return the version of the weights after training from `first_step` through all complete steps."""
        version = first_step
        while self._metadata(version).get("complete") == "true":
            version += 1
        return version

    def _remove_newer_than(self, version: int) -> None:
        """Remove files with trajectories that weights newer than `version` have sampled."""
        # No step is sampled by a version above its own number, so the files of the steps up to
        # `version` can stay.
        later = [
            file
            for file in (*self.folder.glob("step_*.parquet"), *self._logs.glob("step_*.jsonl"))
            if _step_of(file) > version
        ]
        for file in later:
            if file.suffix == ".jsonl":
                newest = CollectionLog(file, self._recipe).newest_version
            else:
                newest = int(self._metadata(_step_of(file)).get("newest_version", "0"))
            if newest > version:
                file.unlink()

    def _metadata(self, step: int) -> dict[str, str]:
        """Return the metadata of a step's file; {} if it is missing, damaged, or of another recipe."""
        try:
            metadata = trajectory_metadata(self.path(step))
        except RecordError:
            return {}
        return metadata if metadata.get("recipe") == self._recipe else {}


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
