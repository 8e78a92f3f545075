"""The outputs of a training: progress on the terminal, metrics.jsonl, trackers and traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.assign import mean_advantages
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.tracking.metrics_log import STEP_TIME, MetricsLog
from mcore_mas.tracking.mlflow_store import open_store
from mcore_mas.tracking.mlflow_training import (
    MlflowWriter,
    TrainingRecord,
    start_training_record,
)
from mcore_mas.tracking.progress import ProgressReporter
from mcore_mas.tracking.sender import MetricsSender
from mcore_mas.tracking.traces import TracedTrajectory, TraceSender, choose_trajectories
from mcore_mas.tracking.writers import WRITERS, missing_libraries
from rollout.records.trajectory import Group

CLOSE_TIMEOUT_S = 30.0  # time at the end of a training for sending the remaining metrics
# Metrics that the progress shows, by label.
_PROGRESS_METRICS = {
    "reward": "reward/mean",
    "accuracy": "validation/accuracy",
    "behind": "staleness/mean",
    "tokens/s": "time/tokens_per_s",
}


class Logbook:
    """Reporter of a training's steps, notes and traces to all outputs."""

    def __init__(
        self,
        progress: ProgressReporter,
        metrics_log: MetricsLog,
        traces: TraceSender,
        traces_per_step: int,
    ) -> None:
        """Store the outputs, and the number of trajectories that are traced in a traced step."""
        self.has_reported = False
        self._progress = progress
        self._metrics_log = metrics_log
        self._traces = traces
        self._traces_per_step = traces_per_step

    def note(self, text: str) -> None:
        """Print one line of text."""
        self._progress.note(text)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step, counted from 0. Trackers read its metrics from metrics.jsonl."""
        self.has_reported = True
        self._metrics_log.append(step, {**metrics, STEP_TIME: time.time()})
        progress_metrics = {
            label: metrics[name] for label, name in _PROGRESS_METRICS.items() if name in metrics
        }
        self._progress.step(step + 1, progress_metrics)

    def trace(self, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        """Trace some trajectories of a step in MLflow, each turn with its sample's advantage."""
        advantages = mean_advantages(samples)
        self._traces.send(
            [
                TracedTrajectory(trajectory=trajectory, task=task, advantages=advantages)
                for trajectory, task in choose_trajectories(groups, self._traces_per_step)
            ]
        )


@contextmanager
def open_logbook(config: RunConfig, config_path: Path, first_step: int) -> Iterator[Logbook]:
    """Open the outputs of a training that continues at `first_step`.

    At the end, the remaining metrics are sent to the trackers for at most 30 seconds. All metrics
    are in metrics.jsonl, from which `mcore-mas track` sends missing ones to MLflow.

    A training that is stopped before it has reported a step does not wait for the trackers: on a
    busy machine the import of MLflow alone may take these 30 seconds.
    """
    path = config.folder / "train" / "metrics.jsonl"
    with ProgressReporter(f"{config.run} train", config.trainer.steps, first_step) as progress:
        metrics_log = MetricsLog(path, first_step, progress.note)
        record = start_training_record(config, config_path, first_step)
        senders = [
            _mlflow_sender(config, record, path, progress.note),
            *_other_senders(config, first_step, path, progress.note),
        ]
        traces = TraceSender(config, record, progress.note)
        logbook = Logbook(progress, metrics_log, traces, config.tracking.traces)
        status = "FAILED"
        try:
            yield logbook
            metrics_log.flush()
            status = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            status = "KILLED"
            raise
        finally:
            traces.close()
            for sender in senders:
                sender.close(status)
            if logbook.has_reported or status != "KILLED":
                deadline = time.monotonic() + CLOSE_TIMEOUT_S
                for sender in senders:
                    sender.join(deadline - time.monotonic())
                traces.join(deadline - time.monotonic())


def _mlflow_sender(
    config: RunConfig, record: TrainingRecord, path: Path, warn: Callable[[str], None]
) -> MetricsSender:
    def open_writer() -> MlflowWriter:
        writer = MlflowWriter(open_store(config), config, record)
        writer.resume()
        return writer

    advice = f", and `mcore-mas track {config.results}` sends them"
    return MetricsSender("MLflow", open_writer, path, warn, advice=advice)


def _other_senders(
    config: RunConfig, first_step: int, path: Path, warn: Callable[[str], None]
) -> list[MetricsSender]:
    """Start a sender for each tracker in `tracking.further_trackers`.

    They send the rows that are added from now on. Rows that are in metrics.jsonl already are skipped,
    even if an earlier start could not send them: TensorBoard and wandb would show a row that is sent
    twice as two points, or refuse it.

    Raises:
        ConfigError: the library of a tracker is not installed.
    """
    problems = list(missing_libraries(config))
    if problems:
        raise ConfigError(problems[0])
    offset = path.stat().st_size
    return [
        MetricsSender(name, partial(WRITERS[name], config, first_step), path, warn, offset=offset)
        for name in config.tracking.further_trackers
    ]
