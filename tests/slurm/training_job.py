"""Training as the pipeline's rule `train` runs it in a Slurm job, but without Snakemake.

`python -m tests.slurm.training_job CONFIG LOG NODES CPUS`

With the variable of `tests.support.ray_worker`, the workers of Ray are forks.
"""

import os
import sys
from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped
from mcore_mas.runtime.slurm_ray import ray_over_machines
from tests.support.ray_worker import VARIABLE

config, log, nodes, cpus = sys.argv[1:]
folder = Path(config).parent / "train"
with (
    logged(log),
    requeue_when_stopped(folder / "checkpoints"),
    ray_over_machines(int(nodes), int(cpus), folder / "ray.log") as address,
):
    if VARIABLE in os.environ:
        import pytest

        from tests.support import ray_forks

        patch = pytest.MonkeyPatch()
        ray_forks.leave_out_idle_processes(patch)
        ray_forks.fork_processes(patch)

    from mcore_mas.training.train import train

    train(Path(config), address)
