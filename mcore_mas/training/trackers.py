"""Trackers beside MLflow: TensorBoard, Weights & Biases (wandb) and Trackio, each in a thread of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.rollout.base.files import json_lines, write_json
from mcore_mas.training.joblog import cause
from mcore_mas.training.tracking import NO_METRICS, Sink

_PATIENCE_S = 30.0  # at the end of a run, for what is left
_FIRST_S = 1.0  # half of the pause after a first fault


class _TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir results` shows every run's."""

    def __init__(self, config: RunConfig, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = config.folder / "train" / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=first or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Run:
    """A run of a library with wandb's interface; one that goes on is the same run there.

    Where it writes, and whether it needs a key, is the library's own affair: WANDB_MODE=offline keeps wandb here.
    """

    def __init__(self, config: RunConfig, library: Any, **settings: Any) -> None:
        values = config.model_dump(mode="json")
        self._run = library.init(project=config.tracking.experiment, name=config.run, config=values, **settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"training_step": step, **metrics}, step=step + 1)  # the validation before training is step -1

    def close(self) -> None:
        self._run.finish()


def _wandb(config: RunConfig, first: int) -> _Run:
    import wandb

    folder = config.folder / "train"
    return _Run(config, wandb, id=config.run, resume="allow", dir=str(folder), settings=wandb.Settings(console="off"))


def _trackio(config: RunConfig, first: int) -> _Run:
    import trackio

    return _Run(config, trackio, resume="allow", embed=False)


TRACKERS: dict[str, Callable[[RunConfig, int], _TensorBoard | _Run]] = {
    "tensorboard": _TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class _Fed:
    """One tracker, fed from metrics.jsonl by a thread: what it does not take is drawn once it works again."""

    def __init__(self, name: str, config: RunConfig, first: int, note: Callable[[str], None]) -> None:
        self._name, self._config, self._note = name, config, note
        self._path = config.folder / "train" / "metrics.jsonl"
        self._record = self._path.with_name(f"{name}.json")  # says what starts before this one have drawn
        self._next = -1  # step to draw
        with suppress(OSError, ValueError, LookupError, TypeError):
            self._next = min(int(json.loads(self._record.read_bytes())["next"]), first)
        self._read = 0  # bytes of metrics.jsonl
        self._writer: _TensorBoard | _Run | None = None
        self._faults, self._again = 0, 0.0  # since it worked; when to try again
        self._sink = Sink(f"tracker-{name}")
        self.log()

    def log(self) -> None:
        self._sink.put(self._draw)  # where too many wait, one of them draws this row too

    def close(self) -> None:
        self._sink.put(lambda: self._draw(last=True))
        if not self._sink.close(_PATIENCE_S):
            self._note(f"tracker {self._name} hangs: steps from {self._next} on are in {self._path} alone")

    def _draw(self, *, last: bool = False) -> None:
        if time.monotonic() < self._again and not last:
            return
        try:
            if self._writer is None:
                self._writer = TRACKERS[self._name](self._config, max(self._next, 0))
            rows, read = json_lines(self._path, self._read) if self._path.is_file() else ([], 0)
            for row in rows:
                if row["step"] >= self._next:
                    metrics = {name: value for name, value in row.items() if name not in NO_METRICS}
                    self._writer.log(row["step"], metrics)
                    self._next = row["step"] + 1
            if rows:
                self._read = read
                write_json(self._record, {"next": self._next})
            if last:
                self._writer.close()
        except Exception as error:  # of foreign code, which must not end a training
            self._faults += 1
            self._writer = None  # it is opened anew
            self._again = time.monotonic() + min(60.0, _FIRST_S * 2.0**self._faults)
            if self._faults == 1 or last:
                self._note(f"tracker {self._name} does not draw ({cause(error)}); {self._path} has it for later")
            return
        if self._faults:
            self._note(f"tracker {self._name} works again and has all steps before {self._next}")
        self._faults = 0


class Trackers:
    """The trackers that a run names besides MLflow."""

    def __init__(self, config: RunConfig, first: int, note: Callable[[str], None]) -> None:
        """Open them; the run goes on at step `first`.

        Raises:
            ConfigError: the library of one is not installed.
        """
        names: Sequence[str] = config.tracking.also
        for name in names:
            if find_spec(name) is None:
                raise ConfigError(f"tracking.also: {name} is not installed; pip install {name}, or take it out")
        self._fed = [_Fed(name, config, first, note) for name in names]

    def log(self) -> None:
        """Have what metrics.jsonl has by now drawn; returns at once."""
        for fed in self._fed:
            fed.log()

    def close(self) -> None:
        """Have what is left written out, for half a minute each at most."""
        for fed in self._fed:
            fed.close()
