"""Logging of a training run: progress on the terminal, metrics.jsonl, metrics and traces in MLflow."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import mean_advantages
from mcore_mas.credit.samples import Sample
from mcore_mas.reports.pages import drawing
from mcore_mas.runtime.joblog import Stopped, terminal
from mcore_mas.tracking.feed import CLOCK, EPOCH, Feed, Tracker
from mcore_mas.tracking.traces import Traces, chosen
from mcore_mas.tracking.trackers import open_trackers
from rollout.base.failpoints import failpoint
from rollout.base.files import json_lines, write_text
from rollout.base.ownership import check_owner, epoch_of
from rollout.base.processes import say
from rollout.records.trajectory import Group

_SHOWN = {
    "reward": "reward/mean",
    "accuracy": "validation/accuracy",
    "behind": "staleness/mean",
    "tokens/s": "time/tokens_per_s",
}


class Logbook:
    """One run's places to write to, all of them told of the same steps."""

    def __init__(
        self,
        reporter: Reporter,
        journal: Journal,
        tracker: Tracker,
        traces: Traces,
        traced: int,
        feeds: Sequence[Feed],
    ) -> None:
        """`traced` trajectories of every step become traces; `feeds` are MLflow's `tracker` and those beside it."""
        self._reporter, self._journal, self._tracker, self._feeds = (
            reporter,
            journal,
            tracker,
            feeds,
        )
        self._traces, self._traced = traces, traced
        self.note = reporter.note

    @property
    def tracking_run(self) -> str | None:
        """The MLflow run, None before there is one."""
        return self._tracker.run_id

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step`, counted from 0, is finished."""
        self._journal.log(step, {**metrics, CLOCK: time.time()})
        for feed in self._feeds:
            feed.log()
        self._reporter.step(
            step + 1, {label: metrics[name] for label, name in _SHOWN.items() if name in metrics}
        )

    def trace(self, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        """Have some of a step's trajectories traced, each turn with its sample's advantage, and drawn if of games."""
        tasks = {group.task.id: group.task for group in groups}
        self._traces.send(
            chosen(groups, self._traced),
            mean_advantages(samples),
            lambda played: drawing(tasks[played.task_id], played),
        )


@contextmanager
def open_logbook(
    config: RunConfig, config_path: Path, first: int, mlflow_run: str | None
) -> Iterator[Logbook]:
    """The logbook of a run that goes on at step `first`, in the MLflow run of before if there is one."""
    path, ended = config.folder / "train" / "metrics.jsonl", "FAILED"
    with Reporter(f"{config.run} train", config.trainer.steps, first) as reporter:
        journal = Journal(
            path, first, reporter.note
        )  # before trackers: they draw what it has from now on
        others = open_trackers(config, first, reporter.note)
        tracker = Tracker(config, config_path, first, mlflow_run, reporter.note)
        feeds = [tracker, *others]
        try:
            yield Logbook(
                reporter,
                journal,
                tracker,
                Traces(tracker, reporter.note),
                config.tracking.traces,
                feeds,
            )
            journal.write()  # of the last step, what a full disk has kept out
            ended = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            ended = "KILLED"
            raise
        finally:
            for feed in feeds:
                feed.finish(ended)


_SECONDS_BETWEEN_LINES = 15.0  # on a terminal that several jobs share


class Reporter:
    """Tells of steps as they finish; `note` is for anything else worth a line.

    A process on a terminal draws a bar. A job whose output goes to a log writes a line per step there, and now and then
    one to the terminal it was started from, where other jobs may be writing too.
    """

    def __init__(self, what: str, total: int, first: int = 0) -> None:
        """`what` is being done in `total` steps, of which `first` are done already."""
        self._what, self._total = what, total
        self._last_line = time.monotonic()
        self._since: tuple[int, float] | None = (
            None  # the first steps that were told, and when: engines had started
        )
        self._bar: Progress | None = None
        self._shared = terminal() if not sys.stderr.isatty() else None
        self._end = (
            "\r" if Console(stderr=True).is_jupyter else "\n"
        )  # a cell of a notebook keeps the last line
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("{task.fields[status]}"), console=Console(stderr=True)
            )
            self._task = self._bar.add_task(what, total=total, completed=first, status="")

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            with suppress(OSError):  # of a terminal that is gone
                self._bar.stop()

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps are finished; `metrics` are shown as they are named."""
        status = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self._bar:
            self._bar.update(self._task, completed=done, status=status)
            return
        left, now = "", time.monotonic()
        first, started = self._since = self._since or (done, now)
        if done > first:
            seconds = (now - started) / (done - first) * (self._total - done)
            left = f"  left {int(seconds // 60)}:{int(seconds % 60):02d}"
        line = f"{self._what}: {done}/{self._total}  {status}{left}"
        say(line, end="\n" if done == self._total else self._end)
        if self._shared and (done == self._total or now - self._last_line > _SECONDS_BETWEEN_LINES):
            self._last_line = now
            say(line, self._shared)

    def note(self, text: str) -> None:
        """One line of text."""
        line = f"{self._what}: {text}"
        say(line)  # above the bar, where one is drawn
        if self._shared:
            say(line, self._shared)


def _of_owners(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows without those that an owner wrote after a later one had taken its folder over."""
    latest = 0
    for row in rows:
        epoch = row.get(EPOCH, 0)
        if type(epoch) is int and epoch >= latest:
            latest = epoch
            yield row


class Journal:
    """One JSON object per training step in a file that survives restarts."""

    def __init__(self, path: Path, first_step: int, warn: Callable[[str], None] = print) -> None:
        """Continue `path` at `first_step`; rows of steps that will be taken again are dropped."""
        self._path, self._warn = path, warn
        self._waiting = ""  # what could not be written yet
        rows = json_lines(path)[0] if path.is_file() else []
        kept = [
            row
            for row in _of_owners(rows)
            if type(row.get("step")) is int and row["step"] < first_step
        ]
        self._last: int = kept[-1]["step"] if kept else -2  # step of the last row
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, once: a run that was stopped right after it had made up a validation makes it up again.

        What cannot be written, because a disk is full, is told of and written with the next step.
        """
        if step <= self._last:
            return
        self._last = step
        self._waiting += json.dumps({"step": step, **metrics, EPOCH: epoch_of(self._path)}) + "\n"
        self.write()

    def write(self) -> None:
        """Append what waits, if the disk lets us."""
        if not self._waiting:
            return
        check_owner(self._path)
        try:
            failpoint("metrics.begun")
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
                file.flush()
                failpoint("metrics.written")
                os.fsync(file.fileno())
            self._waiting = ""
        except OSError as error:
            self._warn(
                f"{self._path}: the metrics of step {self._last} wait for the next ({error.strerror})"
            )
            if not self._waiting.startswith("\n"):
                self._waiting = f"\n{self._waiting}"  # part of it may be there
