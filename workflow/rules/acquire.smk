# Published inputs: fetched, converted and checked where `snakemake acquire_drmas_1` and the like ask for them.
from mcore_mas.pipeline.sources import acquirable, describe_paths, known_sources


rule acquire_input:
    # The input itself is no declared output: Snakemake would delete a folder of yours that a job found damaged.
    input:
        lambda wildcards: [
            f"data/acquired/{item}.json" for item in known_sources()[wildcards.item].needs
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
        there=lambda wildcards, output: Path(wildcards.item).exists()
        or not Path(output.receipt).exists(),
    message:
        "{wildcards.item}: fetch it, or check what is there"
    script:
        "../scripts/acquire_input.py"


rule report_inputs:
    input:
        receipts=lambda _: [
            f"data/acquired/{item}.json" for item in acquirable(paper_suite.inputs(SUITE))[0]
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
        by_hand=lambda _: describe_paths(acquirable(paper_suite.inputs(SUITE))[1]),
        runs=lambda _: {run: (config["data"], config["seed"]) for run, config in SUITE.runs.items()},
    message:
        "{output.page}: what was acquired, and what leaks"
    script:
        "../scripts/report_inputs.py"
