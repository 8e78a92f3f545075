"""Writers for further trackers: TensorBoard and Weights & Biases (wandb)."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.tracking.metrics_log import MetricsRow, step_metrics
from mcore_mas.tracking.sender import MetricsWriter
from rollout.base.files import write_text


class TensorBoardWriter:
    """Writes event files to the run's folder; `tensorboard --logdir results` shows all runs."""

    def __init__(self, config: RunConfig, first_step: int) -> None:
        """Open new event files, which hide points of earlier ones from `first_step` on."""
        from torch.utils.tensorboard import SummaryWriter

        folder = config.folder / "train" / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Add the rows' metrics as scalars."""
        for row in rows:
            for name, value in step_metrics(row).items():
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the event files; they have no status."""
        self._writer.close()


class WandbWriter:
    """Writes to a run of Weights & Biases; a training that resumes continues its run.

    wandb's own environment variables apply: WANDB_MODE=offline keeps the run on this machine.
    """

    def __init__(self, config: RunConfig, first_step: int) -> None:
        """Start or continue the run whose id is in train/wandb.id; `first_step` is not used."""
        import wandb

        folder = config.folder / "train"
        self._run = wandb.init(
            project=config.tracking.experiment,
            name=config.run,
            config=config.model_dump(mode="json"),
            id=_wandb_run_id(folder, config.run),
            resume="allow",
            dir=str(folder),
            settings=wandb.Settings(console="off"),
        )

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Log the rows' metrics; the validation before training is step 0 of wandb."""
        for row in rows:
            metrics = {"training_step": row["step"], **step_metrics(row)}
            self._run.log(metrics, step=row["step"] + 1)

    def close(self, status: str) -> None:
        """Finish the run; the exit code tells wandb whether it failed."""
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


WRITERS: Mapping[str, Callable[[RunConfig, int], MetricsWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
}


def missing_libraries(config: RunConfig) -> Iterator[str]:
    """Yield one line for each tracker in `tracking.further_trackers` whose library is not installed."""
    for name in config.tracking.further_trackers:
        if find_spec(name) is None:
            yield (
                f"tracking.further_trackers: {name} is not installed; pip install {name}, or remove it from "
                "the list"
            )


def _wandb_run_id(folder: Path, run: str) -> str:
    """Return the run's id. It is random, because other folders may have runs of the same name."""
    path = folder / "wandb.id"
    if not path.is_file():
        write_text(path, f"{run}-{uuid.uuid4().hex[:8]}")
    return path.read_text(encoding="utf-8")
