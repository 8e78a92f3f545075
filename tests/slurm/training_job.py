"""What the rule `train` runs in a job, without the Snakemake around it: `training_job.py CONFIG LOG`."""

import sys
from pathlib import Path

from mcore_mas.training.joblog import logged
from mcore_mas.training.slurm import queued_again

config = Path(sys.argv[1])
with logged(sys.argv[2]), queued_again(config.parent / "train" / "checkpoints"):
    from mcore_mas.training.train import train

    train(config)
