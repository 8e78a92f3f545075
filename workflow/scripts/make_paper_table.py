"""Rule `make_paper_table`: write a paper's table with our results, and plot its runs' curves.

The table and the curves are also sent to MLflow.
"""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.paper_suite import write_paper_table
    from mcore_mas.reports.charts import write_charts
    from mcore_mas.tracking.publish import publish_within_limit

    table = snakemake.wildcards.table
    markdown = Path(snakemake.output.markdown)
    evaluations = dict(snakemake.params.evaluations)
    write_paper_table(table, evaluations, markdown, scale=snakemake.params.scale)

    results = markdown.parents[1]
    runs = {Path(path).parents[1].name: path for paths in evaluations.values() for path in paths}
    metrics = {run: results / run / "train" / "metrics.jsonl" for run in runs}
    # A run that is only evaluated untrained has no metrics.
    trained = {run: path for run, path in metrics.items() if path.is_file()}
    write_charts(trained, Path(snakemake.output.charts))

    publish_within_limit(results, runs, [table])
