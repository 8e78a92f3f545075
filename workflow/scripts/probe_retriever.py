"""Rule `probe_retriever`: measure recall and latency of a run's retrieval server."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.passage_index import probe_index
    from mcore_mas.tracking.stage_record import stage_record

    with stage_record(snakemake.log[0]):
        probe_index(
            Path(snakemake.params.config),
            Path(snakemake.input.manifest).parent,
            Path(snakemake.output.probe),
        )
