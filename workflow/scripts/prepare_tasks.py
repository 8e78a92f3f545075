"""Rule `prepare_tasks`: make a run's tasks, and its passages if its team searches."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.prepare import prepare_tasks
    from mcore_mas.tracking.stage_record import stage_record

    with stage_record(snakemake.log[0]):
        prepare_tasks(Path(snakemake.params.config), Path(snakemake.output.train).parent)
