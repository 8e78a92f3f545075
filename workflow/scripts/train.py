"""Rule `train`: train every policy of a run, from the newest checkpoint if there is one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped
from mcore_mas.runtime.slurm_ray import ray_over_machines

out_dir = Path(snakemake.output.done).parent
resources = snakemake.resources
with (
    logged(snakemake.log[0]),
    requeue_when_stopped(out_dir / "checkpoints"),
    ray_over_machines(resources.nodes, resources.cpus_per_task, out_dir / "ray.log") as address,
):
    from mcore_mas.training.train import train

    train(Path(snakemake.params.config), address)
