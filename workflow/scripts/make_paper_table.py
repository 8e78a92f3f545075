"""Rule `make_paper_table`: a paper's table, ours beside theirs."""

from pathlib import Path

from mcore_mas.training.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.paper_suite import write_paper_table

    write_paper_table(
        snakemake.wildcards.table,
        dict(snakemake.params.evaluations),
        Path(snakemake.output.markdown),
        scale=snakemake.params.scale,
        seeds=list(snakemake.params.seeds),
    )
