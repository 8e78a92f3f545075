"""Rule `bootstrap`: cold-starts the base model by supervised training on generated demonstrations."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import queued_again

out = Path(snakemake.output.done).parent
with logged(snakemake.log[0]), queued_again(out / "checkpoints", "*/step_*"):
    from mcore_mas.pipeline.cold_start import bootstrap
    from mcore_mas.tracking.stage_record import stage_record

    with stage_record(snakemake.log[0]):
        bootstrap(Path(snakemake.params.config), Path(snakemake.input.model).parent, out)
