"""Rule `evaluate`: score a run's team on its test tasks."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped, slurm_job_id
from mcore_mas.runtime.slurm_ray import ray_over_machines

scores = Path(snakemake.output.scores)
resources = snakemake.resources
machines = resources.nodes if slurm_job_id() else 1  # without Slurm, this machine has all servers
ray_log = scores.with_name(f"{scores.stem}-ray.log")
# A stopped evaluation saves parts, from which the next attempt continues.
with (
    logged(snakemake.log[0]),
    requeue_when_stopped(scores.with_suffix(""), "part_*"),
    ray_over_machines(machines, resources.cpus_per_task, ray_log) as address,
):
    from mcore_mas.evaluation.evaluate import evaluate
    from mcore_mas.tracking.publish import publish_evaluation

    config = Path(snakemake.params.config)
    evaluate(config, snakemake.wildcards.state, scores, snakemake.params.seats, address=address)
    publish_evaluation(config)
