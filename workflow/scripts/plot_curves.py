"""Rule `plot_curves`: plot the curves of a suite's runs and their agents on one page."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.charts import write_charts

    metrics_by_run = {}
    for done in map(Path, snakemake.input.done):
        run = done.parents[1].name
        metrics_by_run[run] = done.with_name("metrics.jsonl")
    write_charts(metrics_by_run, Path(snakemake.output.page))
