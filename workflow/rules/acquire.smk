# Published inputs: downloaded, converted and checked by targets such as `snakemake acquire_drmas_1`.
from mcore_mas.pipeline.sources import describe_paths, load_sources, sort_by_acquisition


rule acquire_input:
    # The acquired file is not declared as an output: if a job finds a folder of the user's to be
    # damaged, Snakemake would delete it.
    input:
        lambda wildcards: [
            f"data/acquired/{item}.json" for item in load_sources()[wildcards.item].needs
        ],
    output:
        receipt="data/acquired/{item}.json",
    log:
        "data/acquired/logs/{item}.log",
    wildcard_constraints:
        item="(data|models)/.+",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
        runtime=1440,
    params:
        # Snakemake runs a job again if one of its parameters changes. This parameter changes if the
        # input is removed after it was acquired.
        exists_or_new=lambda wildcards, output: Path(wildcards.item).exists()
        or not Path(output.receipt).exists(),
    message:
        "{wildcards.item}: download it, or check the existing file"
    script:
        "../scripts/acquire_input.py"


rule report_inputs:
    input:
        receipts=lambda _: [
            f"data/acquired/{item}.json"
            for item in sort_by_acquisition(paper_suite.inputs(SUITE)).downloadable
        ],
    output:
        page="data/acquired/{suite}.md",
    log:
        "data/acquired/logs/{suite}.log",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        by_hand=lambda _: describe_paths(sort_by_acquisition(paper_suite.inputs(SUITE)).by_hand),
        runs=lambda _: {run: (config["data"], config["seed"]) for run, config in SUITE.runs.items()},
    message:
        "{output.page}: report on acquired inputs and leaks between splits"
    script:
        "../scripts/report_inputs.py"
