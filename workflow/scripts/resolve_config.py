"""Rule `resolve_config`: writes the config that was composed and checked when the pipeline was planned."""

from pathlib import Path

from mcore_mas.training.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.suite import write_config

    write_config(Path(snakemake.output.config), snakemake.params.config)
