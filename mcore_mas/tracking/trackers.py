"""Trackers beside MLflow: TensorBoard, Weights & Biases (wandb) and Trackio, each in a thread of its own."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.tracking.feed import NO_METRICS, Feed
from rollout.base.files import json_lines, write_json, write_text


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
        self._run = library.init(
            project=config.tracking.experiment, name=config.run, config=values, **settings
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(
            {"training_step": step, **metrics}, step=step + 1
        )  # the validation before training is step -1

    def close(self) -> None:
        self._run.finish()


def _wandb(config: RunConfig, first: int) -> _Run:
    import wandb

    folder = config.folder / "train"
    if not (
        kept := folder / "wandb.id"
    ).is_file():  # others of its name are in other folders, or were removed
        write_text(kept, f"{config.run}-{uuid.uuid4().hex[:8]}")
    own = {"id": kept.read_text(), "dir": str(folder)}
    return _Run(config, wandb, **own, resume="allow", settings=wandb.Settings(console="off"))


def _trackio(config: RunConfig, first: int) -> _Run:
    import trackio

    began = (config.folder / "train" / "trackio.json").is_file()  # it has steps of this training
    return _Run(config, trackio, resume="allow" if began else "never", embed=False)


TRACKERS: dict[str, Callable[[RunConfig, int], _TensorBoard | _Run]] = {
    "tensorboard": _TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class _Fed(Feed):
    def __init__(
        self, name: str, config: RunConfig, first: int, note: Callable[[str], None]
    ) -> None:
        path, following = config.folder / "train" / "metrics.jsonl", -1  # step to draw
        self._name, self._config = name, config
        self._record = path.with_name(f"{name}.json")  # says what starts before this one have drawn
        with suppress(OSError, ValueError, LookupError, TypeError):
            following = min(int(json.loads(self._record.read_bytes())["next"]), first)
        self._writer: _TensorBoard | _Run | None = None
        super().__init__(f"tracker {name}", path, note, following - 1)
        self.log()

    def _send(self, status: str | None) -> None:
        writer = self._writer or TRACKERS[self._name](self._config, max(self._sent + 1, 0))
        self._writer = None  # after a fault it is opened anew
        rows, read = json_lines(self._journal, self._read) if self._journal.is_file() else ([], 0)
        for row in rows:
            if row["step"] > self._sent:
                writer.log(
                    row["step"],
                    {name: value for name, value in row.items() if name not in NO_METRICS},
                )
                self._sent = row["step"]
        if rows:
            self._read = read
            write_json(self._record, {"next": self._sent + 1})
        if status is not None:
            writer.close()
        self._writer = writer


def not_installed(config: RunConfig) -> Iterator[str]:
    """The trackers whose library is not here, a line each."""
    for name in config.tracking.also:
        if find_spec(name) is None:
            yield f"tracking.also: {name} is not installed; pip install {name}, or take it out"


def open_trackers(config: RunConfig, first: int, note: Callable[[str], None]) -> list[Feed]:
    """The trackers that a run names besides MLflow; it goes on at step `first`.

    Raises:
        ConfigError: the library of one is not installed.
    """
    for line in not_installed(config):
        raise ConfigError(line)
    return [_Fed(name, config, first, note) for name in config.tracking.also]
