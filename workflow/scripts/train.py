"""Rule `train`: trains every policy of a run, from its last checkpoint if there is one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import queued_again, ray_over

folder, needs = Path(snakemake.output.done).parent, snakemake.resources
with (
    logged(snakemake.log[0]),
    queued_again(folder / "checkpoints"),
    ray_over(needs.nodes, needs.cpus_per_task, folder / "ray.log") as address,
):
    from mcore_mas.training.train import train

    train(Path(snakemake.params.config), address)
