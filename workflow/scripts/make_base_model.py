"""Rule `make_base_model`: make the tokenizer and the random model of a cold start."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.base_model import make_base_model
    from mcore_mas.tracking.stage_record import stage_record

    tasks_dir = Path(snakemake.input.tasks).parent
    model_dir = Path(snakemake.output.model).parent
    with stage_record(snakemake.log[0]):
        make_base_model(Path(snakemake.params.config), tasks_dir, model_dir)
