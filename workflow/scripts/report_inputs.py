"""Rule `report_inputs`: write a page on acquired inputs, dropped rows and leaks between splits."""

from pathlib import Path

from mcore_mas.runtime.joblog import logged

with logged(snakemake.log[0]):
    from mcore_mas.pipeline.inputs_page import report_inputs

    report_inputs(
        [Path(path) for path in snakemake.input.receipts],
        dict(snakemake.params.runs),
        Path(snakemake.output.page),
        by_hand=list(snakemake.params.by_hand),
    )
