# Data: the tasks of each run, and the passages that its team searches.


rule prepare_tasks:
    input:
        files=lambda wildcards: SUITE.data_files(wildcards.run),
    output:
        **TASKS,
    log:
        "<results>/{run}/logs/prepare_tasks.log",
    benchmark:
        "<results>/{run}/benchmarks/prepare_tasks.jsonl"
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=False),
    conda:
        ENVIRONMENT
    resources:
        mem_mb=lambda wildcards, attempt: retry_memory_mb(
            tasks_mb(SUITE.run_config(wildcards.run).data.paths), attempt, NODE_MEM_MB
        ),
        runtime=30,
    params:
        **config_params("tasks"),
    message:
        "{wildcards.run}: make the tasks"
    script:
        "../scripts/prepare_tasks.py"


use rule prepare_tasks as prepare_tasks_and_passages with:
    output:
        **TASKS,
        passages="<results>/{run}/tasks/passages.jsonl",
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=True),
    message:
        "{wildcards.run}: make the tasks and the passages"


rule share_tasks:
    input:
        tasks_of_owner,
    output:
        **TASKS,
    log:
        "<results>/{run}/logs/share_tasks.log",
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=False, links_tasks=True),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=100,
        runtime=5,
    message:
        "{wildcards.run}: link the tasks of {input[0]}"
    shell:
        # The links are symbolic, because Snakemake sets the time stamps of outputs. Through hard
        # links it would change the files of the other run.
        'ln --symbolic --relative --force {input:q} "$(dirname {output.train:q})" 2> {log:q}'
