"""Rule `study_stability`: compare the estimators of a suite's runs over their seeds."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.reports.study import study_stability

    study_stability(dict(snakemake.params.runs), [Path(path) for path in snakemake.output])
