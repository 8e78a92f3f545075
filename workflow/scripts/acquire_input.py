"""Rule `acquire_input`: download and convert a published data file or model, or check an existing one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.acquire import acquire
    from mcore_mas.pipeline.hub import Hub

    acquire(snakemake.wildcards.item, Path(snakemake.output.receipt), Hub())
