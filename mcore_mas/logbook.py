"""What a training run tells of itself: progress on the terminal, metrics.jsonl, metrics and traces in MLflow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from mcore_mas.config import RunConfig
from mcore_mas.credit import by_place
from mcore_mas.pictures import drawing
from mcore_mas.progress import Reporter
from mcore_mas.run import Stopped
from mcore_mas.samples import Sample
from mcore_mas.traces import Traces, chosen
from mcore_mas.tracking import Journal, Tracker
from rollout.records import Group

_SHOWN = {
    "reward": "reward/mean",
    "accuracy": "validation/accuracy",
    "behind": "staleness/mean",
    "tokens/s": "time/tokens_per_s",
}


class Logbook:
    """One run's places to write to, all of them told of the same steps."""

    def __init__(self, reporter: Reporter, journal: Journal, tracker: Tracker, traces: Traces, traced: int) -> None:
        """`traced` trajectories of every step become traces."""
        self._reporter, self._journal, self._tracker = reporter, journal, tracker
        self._traces, self._traced = traces, traced
        self.tracking_run = tracker.run_id
        self.note = reporter.note

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step`, counted from 0, is finished."""
        self._journal.log(step, metrics)
        self._tracker.log(step + 1, metrics)
        self._reporter.step(step + 1, {label: metrics[name] for label, name in _SHOWN.items() if name in metrics})

    def trace(self, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        """Have some of a step's trajectories traced, each turn with its sample's advantage, and drawn if of games."""
        tasks = {group.task.id: group.task for group in groups}
        self._traces.send(
            chosen(groups, self._traced), by_place(samples), lambda played: drawing(tasks[played.task_id], played)
        )


@contextmanager
def open_logbook(config: RunConfig, config_path: Path, first: int, mlflow_run: str | None) -> Iterator[Logbook]:
    """The logbook of a run that goes on at step `first`, in the MLflow run of before if there is one."""
    with (
        Reporter(f"{config.run} train", config.trainer.steps, first) as reporter,
        _tracker(config, config_path, mlflow_run) as tracker,
        closing(Traces(config.tracking.uri, tracker.experiment_id, tracker.run_id, reporter.note)) as traces,
    ):
        journal = Journal(config.folder / "train" / "metrics.jsonl", first)
        yield Logbook(reporter, journal, tracker, traces, config.tracking.traces)


@contextmanager
def _tracker(config: RunConfig, config_path: Path, run_id: str | None) -> Iterator[Tracker]:
    tracker = Tracker(
        config.tracking.uri,
        config.tracking.experiment,
        run=config.run,
        params=config.model_dump(mode="json"),
        tags={"config_sha256": hashlib.sha256(config_path.read_bytes()).hexdigest()},
        run_id=run_id,
    )
    try:
        yield tracker
    except (KeyboardInterrupt, Stopped):
        tracker.finish("KILLED")
        raise
    except BaseException:
        tracker.finish("FAILED")
        raise
    tracker.finish("FINISHED")
