"""Rule `make_tiny_model`: make a small random model of the same family as a published one."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.base_model import make_tiny_model

    make_tiny_model(Path(snakemake.output.model).parent)
