"""Rule `make_bundle`: pack a table and its runs' records into a file that can be verified."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.bundle import make_bundle

    make_bundle(Path(snakemake.input.provenance), Path(snakemake.output.bundle))
