"""Training as the pipeline's rule `train` runs it in a Slurm job, but without Snakemake.

`python -m tests.slurm.training_job CONFIG LOG NODES CPUS`
"""

import sys
from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped
from mcore_mas.runtime.slurm_ray import ray_over_machines

config, log, nodes, cpus = sys.argv[1:]
folder = Path(config).parent / "train"
with (
    logged(log),
    requeue_when_stopped(folder / "checkpoints"),
    ray_over_machines(int(nodes), int(cpus), folder / "ray.log") as address,
):
    from mcore_mas.training.train import train

    train(Path(config), address)
