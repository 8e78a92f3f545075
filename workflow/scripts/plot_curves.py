"""Rule `plot_curves`: draws the curves of a suite's runs and their agents, in one page."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.charts import write_charts

    runs = {
        Path(done).parent.parent.name: Path(done).with_name("metrics.jsonl")
        for done in snakemake.input.done
    }
    write_charts(runs, Path(snakemake.output.page))
