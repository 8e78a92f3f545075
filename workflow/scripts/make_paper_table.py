"""Rule `make_paper_table`: a paper's table, ours beside theirs, and its runs' curves; MLflow gets all of it."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.paper_suite import write_paper_table
    from mcore_mas.reports.charts import write_charts
    from mcore_mas.tracking.publish import publish_within_limit

    table, out = snakemake.wildcards.table, Path(snakemake.output.markdown)
    write_paper_table(table, dict(snakemake.params.evaluations), out, scale=snakemake.params.scale)
    runs = {
        Path(path).parents[1].name: path
        for paths in snakemake.params.evaluations.values()
        for path in paths
    }
    steps = {run: out.parents[1] / run / "train" / "metrics.jsonl" for run in runs}
    write_charts(
        {run: path for run, path in steps.items() if path.is_file()}, Path(snakemake.output.charts)
    )
    publish_within_limit(out.parents[1], runs, [table])
