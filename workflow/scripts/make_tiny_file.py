"""Rule `make_tiny_file`: generate a small file in the format of a published one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.prepare import make_tiny_file

    make_tiny_file(Path(snakemake.output.file), snakemake.params.format)
