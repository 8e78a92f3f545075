"""The first line of a training that has a checkpoint."""

from pathlib import Path

from mcore_mas.runtime.checkpoint import Checkpoint
from mcore_mas.training.train import describe_start
from tests.support.finished import STEPS, finished


def test_a_finished_run_says_how_to_train_it_further(tmp_path: Path) -> None:
    config = finished(tmp_path, "own", seed=0)
    folder = config.folder / "train" / "checkpoints" / "step_000020"
    last = Checkpoint(folder=folder, step=STEPS, state={}, metric=None)
    assert describe_start(config, last) == (
        "finished already: step 20 of 20; raise trainer.steps to train more, or name another run"
    )

    trainer = config.trainer.model_copy(update={"steps": 25})
    longer = config.model_copy(update={"trainer": trainer})
    assert describe_start(longer, last) == f"continuing from {folder}"

    # It was killed after its last step, before it had written its models.
    (config.folder / "train" / "done.json").unlink()
    assert describe_start(config, last) == f"continuing from {folder}"
