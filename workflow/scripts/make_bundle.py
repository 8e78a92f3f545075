"""Rule `make_bundle`: puts a table and all that it was made of into one file that can be verified elsewhere."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.bundle import make_bundle

    make_bundle(Path(snakemake.input.made), Path(snakemake.output.bundle))
