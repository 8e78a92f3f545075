"""Rule `build_index`: build the search index of a run's passages."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped

# A preempted job encodes until Slurm kills it. If it ended earlier, Slurm would take it for a
# failed job, and not queue it again.
with logged(snakemake.log[0]), requeue_when_stopped(Path(snakemake.log[0]).parent):
    from mcore_mas.pipeline.passage_index import index_passages
    from mcore_mas.tracking.stage_record import stage_record

    config = Path(snakemake.params.config)
    passages = Path(snakemake.input.passages)
    with stage_record(snakemake.log[0]):
        index_passages(config, passages, Path(snakemake.output.manifest).parent)
