"""What the rule `train` runs in a job, without the Snakemake around it.

`python -m tests.slurm.training_job CONFIG LOG NODES CPUS`
"""

import sys
from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import queued_again, ray_over

config, log, nodes, cpus = sys.argv[1:]
folder = Path(config).parent / "train"
with (
    logged(log),
    queued_again(folder / "checkpoints"),
    ray_over(int(nodes), int(cpus), folder / "ray.log") as address,
):
    from mcore_mas.training.train import train

    train(Path(config), address)
