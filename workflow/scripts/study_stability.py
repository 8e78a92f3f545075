"""Rule `study_stability`: compare the estimators of a suite's runs over their seeds."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.study import study_stability

    params = snakemake.params
    outputs = [Path(path) for path in snakemake.output]
    study_stability(dict(params.runs), dict(params.base_evaluation_owner), outputs)
