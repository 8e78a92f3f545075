"""Rule `train`: trains every policy of a run, from its last checkpoint if there is one."""

from pathlib import Path

from mcore_mas.training.joblog import logged
from mcore_mas.training.slurm import queued_again

with logged(snakemake.log[0]), queued_again(Path(snakemake.output.done).parent / "checkpoints"):
    from mcore_mas.training.train import train

    train(Path(snakemake.params.config))
