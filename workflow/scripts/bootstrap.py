"""Rule `bootstrap`: fine-tune the base model on generated demonstrations."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged
from mcore_mas.runtime.slurm import requeue_when_stopped

out_dir = Path(snakemake.output.done).parent
with logged(snakemake.log[0]), requeue_when_stopped(out_dir / "checkpoints", "*/step_*"):
    from mcore_mas.pipeline.cold_start import bootstrap
    from mcore_mas.tracking.stage_record import stage_record

    base_dir = Path(snakemake.input.model).parent
    with stage_record(snakemake.log[0]):
        bootstrap(Path(snakemake.params.config), base_dir, out_dir)
