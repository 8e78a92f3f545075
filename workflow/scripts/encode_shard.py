"""Rule `encode_shard`: encodes a part of a run's passages, from where an earlier try stopped."""

from pathlib import Path

from mcore_mas.training.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.prepare import encode_passages

    config, passages = Path(snakemake.params.config), Path(snakemake.input.passages)
    encode_passages(config, passages, Path(snakemake.output.vectors).parent, int(snakemake.wildcards.number))
