"""Rule `make_paper_table`: a paper's table, ours beside theirs; MLflow gets its runs' results."""

from pathlib import Path

from mcore_mas.training.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.paper_suite import write_paper_table
    from mcore_mas.training.publish import publish

    table, out = snakemake.wildcards.table, Path(snakemake.output.markdown)
    write_paper_table(
        table,
        dict(snakemake.params.evaluations),
        out,
        scale=snakemake.params.scale,
        seeds=list(snakemake.params.seeds),
    )
    runs = {Path(path).parents[1].name: path for paths in snakemake.params.evaluations.values() for path in paths}
    publish(out.parents[1], runs, [table])
