"""Trackers beside MLflow: TensorBoard, Weights & Biases (wandb) and Trackio, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.training.joblog import cause
from mcore_mas.training.tracking import Sink

_PATIENCE_S = 30.0  # at the end of a run, for what is left


class MetricsWriter(Protocol):
    """What a tracker does with a run's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw the metrics of a step."""

    def close(self) -> None:
        """Write out what is left."""


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


def _wandb(config: RunConfig, first: int) -> MetricsWriter:
    import wandb

    folder = config.folder / "train"
    return _Run(config, wandb, id=config.run, resume="allow", dir=str(folder), settings=wandb.Settings(console="off"))


def _trackio(config: RunConfig, first: int) -> MetricsWriter:
    import trackio

    return _Run(config, trackio, resume="allow", embed=False)


TRACKERS: dict[str, Callable[[RunConfig, int], MetricsWriter]] = {
    "tensorboard": _TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class _Fed:
    """One tracker: what it raises is said once, and it is left alone from then on. metrics.jsonl has everything."""

    def __init__(self, name: str, config: RunConfig, first: int, note: Callable[[str], None]) -> None:
        self._name, self._note = name, note
        self._writer: MetricsWriter | None = None
        self._lost = False
        self._sink = Sink(f"tracker-{name}")
        self._sink.put(partial(self._try, self._open, config, first))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._sink.put(partial(self._try, self._draw, step, metrics)):
            self._lose("it is too slow")

    def close(self) -> None:
        self._sink.put(partial(self._try, self._end))
        if not self._sink.close(_PATIENCE_S):
            self._lose(f"it did not end in {_PATIENCE_S:.0f} s")

    def _open(self, config: RunConfig, first: int) -> None:
        self._writer = TRACKERS[self._name](config, first)

    def _draw(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is not None:
            self._writer.log(step, metrics)

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _try(self, job: Callable[..., None], *arguments: Any) -> None:
        if self._lost:
            return
        try:
            job(*arguments)
        except Exception as error:  # of foreign code, which must not end a training
            self._lose(cause(error))

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._note(f"tracker {self._name} draws no more of this run ({why}); metrics.jsonl has everything")


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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Have the metrics of a step drawn; returns at once."""
        for fed in self._fed:
            fed.log(step, metrics)

    def close(self) -> None:
        """Have what is left written out, for half a minute each at most."""
        for fed in self._fed:
            fed.close()
