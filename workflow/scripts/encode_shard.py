"""Rule `encode_shard`: encode one shard of a run's passages, continuing an earlier attempt."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped

# A preempted job encodes until Slurm kills it. If it ended earlier, Slurm would take it for a
# failed job, and not queue it again.
with logged(snakemake.log[0]), requeue_when_stopped(Path(snakemake.log[0]).parent):
    from mcore_mas.pipeline.passage_index import encode_passages
    from mcore_mas.tracking.stage_record import stage_record

    with stage_record(snakemake.log[0]):
        encode_passages(
            Path(snakemake.params.config),
            Path(snakemake.input.passages),
            out_dir=Path(snakemake.output.vectors).parent,
            number=int(snakemake.wildcards.number),
        )
