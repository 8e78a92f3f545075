"""Rule `report`: writes Snakemake's HTML report of the finished table and curves, and sends MLflow the results."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.suite import make_report
    from mcore_mas.reports.tables import headline
    from mcore_mas.tracking.publish import publish_within_limit

    suite, out = dict(snakemake.params.suite), Path(snakemake.output.html)
    page = publish_within_limit(out.parents[1], suite["experiments"], [suite["suite"]])
    suite["headline"] = headline(Path(snakemake.input.table).with_suffix(".csv"))
    links = {"links": {"Compare the trainings in MLflow": page}} if page else {}
    make_report({**suite, **links}, list(snakemake.input), out)
