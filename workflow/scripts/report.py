"""Rule `report`: write Snakemake's HTML report, and send the results to MLflow."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.snakemake_report import make_report
    from mcore_mas.reports.charts import picture_of_key_curves
    from mcore_mas.reports.tables import headline_rows
    from mcore_mas.tracking.publish import publish_within_limit

    suite = dict(snakemake.params.suite)
    html = Path(snakemake.output.html)
    results = html.parents[1]

    mlflow_page = publish_within_limit(results, suite["experiments"], [suite["suite"]])
    if mlflow_page:
        # Backticks within the text would end the link.
        suite["links"] = {"Compare the trainings in MLflow (start mcore-mas ui first)": mlflow_page}
    suite["headline"] = headline_rows(Path(snakemake.input.table).with_suffix(".csv"))
    metrics = {run: results / run / "train" / "metrics.jsonl" for run in suite["experiments"]}
    make_report(suite, list(snakemake.input), html, picture_of_key_curves(metrics))
