"""Rule `make_table`: puts every run's evaluations into one table, and makes the page on the runs."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.runs_page import write_runs_page
    from mcore_mas.reports.tables import make_table

    experiments, output = dict(snakemake.params.experiments), snakemake.output
    tables = [Path(path) for path in (output.csv, output.markdown, output.html)]
    make_table([Path(path) for path in snakemake.input.scores], experiments, tables)
    write_runs_page(tables[0].parents[1], list(experiments), Path(output.runs))
