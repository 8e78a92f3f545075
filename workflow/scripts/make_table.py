"""Rule `make_table`: write the table of all evaluations and the page on the runs."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.runs_page import write_runs_page
    from mcore_mas.reports.tables import make_table

    output = snakemake.output
    experiments = dict(snakemake.params.experiments)
    scores = [Path(path) for path in snakemake.input.scores]
    tables = [Path(path) for path in (output.csv, output.markdown, output.html)]
    make_table(scores, experiments, tables)

    results = Path(output.csv).parents[1]
    write_runs_page(results, list(experiments), Path(output.runs))
