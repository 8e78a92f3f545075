"""Rule `train`: train every policy of a run, from the newest checkpoint if there is one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import queued_again, ray_over

out_dir = Path(snakemake.output.done).parent
resources = snakemake.resources
with (
    logged(snakemake.log[0]),
    queued_again(out_dir / "checkpoints"),
    ray_over(resources.nodes, resources.cpus_per_task, out_dir / "ray.log") as address,
):
    from mcore_mas.training.train import train

    train(Path(snakemake.params.config), address)
