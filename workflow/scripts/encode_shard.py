"""Rule `encode_shard`: encodes a part of a run's passages, from where an earlier try stopped."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import queued_again

# a job that is preempted encodes on until Slurm kills it: one that ends before is a failed one, and not queued again
with logged(snakemake.log[0]), queued_again(Path(snakemake.log[0]).parent):
    from mcore_mas.pipeline.prepare import encode_passages
    from mcore_mas.tracking.stage_record import stage_record

    config, passages = Path(snakemake.params.config), Path(snakemake.input.passages)
    with stage_record(snakemake.log[0]):
        encode_passages(
            config, passages, Path(snakemake.output.vectors).parent, int(snakemake.wildcards.number)
        )
