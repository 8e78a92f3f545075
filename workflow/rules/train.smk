# The model and its training. Checkpoints are never declared outputs: Snakemake deletes what a failed job declared.


rule make_base_model:
    input:
        tasks="<results>/{run}/tasks/train.parquet",
    output:
        model="<results>/{run}/base/config.json",
    log:
        "<results>/{run}/logs/make_base_model.log",
    benchmark:
        "<results>/{run}/benchmarks/make_base_model.jsonl"
    wildcard_constraints:
        run=SUITE.own_starts,
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **settings_of("start"),
    message:
        "{wildcards.run}: make a tokenizer and a randomly initialised model"
    script:
        "../scripts/make_base_model.py"


rule bootstrap:
    input:
        retriever_of,  # the team is measured as it learns
        validation="<results>/{run}/tasks/validation.parquet",
        model="<results>/{run}/base/config.json",
    output:
        done="<results>/{run}/bootstrap/bootstrap.json",
    log:
        "<results>/{run}/logs/bootstrap.log",
    benchmark:
        "<results>/{run}/benchmarks/bootstrap.jsonl"
    wildcard_constraints:
        run=SUITE.own_starts,
    priority: 1
    conda:
        ENVIRONMENT
    resources:
        **needs_of("start"),
        runtime=120,
    params:
        **settings_of("start"),
    message:
        "{wildcards.run}: cold start on demonstrations of every role"
    script:
        "../scripts/bootstrap.py"


rule train:
    input:
        start_of,
        retriever_of,
        train="<results>/{run}/tasks/train.parquet",
        validation="<results>/{run}/tasks/validation.parquet",
    output:
        done="<results>/{run}/train/done.json",
    log:
        "<results>/{run}/logs/train.log",
    benchmark:
        "<results>/{run}/benchmarks/train.jsonl"
    priority: 2
    conda:
        ENVIRONMENT
    resources:
        **needs_of("train"),
        runtime=1440,
    params:
        **settings_of("training"),
    message:
        "{wildcards.run}: reinforcement learning of every policy (follow it: tail -f {log})"
    script:
        "../scripts/train.py"
