"""Rule `report`: writes Snakemake's HTML report of the finished table and curves."""

from pathlib import Path

from mcore_mas.training.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.suite import make_report

    targets = [snakemake.input.table, *snakemake.input.figures]
    make_report(dict(snakemake.params.suite), targets, Path(snakemake.output.html))
