"""Rule `evaluate`: score a run's team on its test tasks."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped

scores = Path(snakemake.output.scores)
# A stopped evaluation saves parts, from which the next attempt continues.
with logged(snakemake.log[0]), requeue_when_stopped(scores.with_suffix(""), "part_*"):
    from mcore_mas.evaluation.evaluate import evaluate
    from mcore_mas.tracking.publish import publish_evaluation

    config = Path(snakemake.params.config)
    evaluate(config, snakemake.wildcards.state, scores, snakemake.params.seats)
    publish_evaluation(config)
