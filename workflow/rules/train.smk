# Training: the base model, its cold start, and reinforcement learning. Checkpoints are not declared
# as outputs, because Snakemake deletes the outputs of a failed job.


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
        run=SUITE.cold_start_pattern,
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        **config_params("cold_start"),
    message:
        "{wildcards.run}: make a tokenizer and a random model"
    script:
        "../scripts/make_base_model.py"


rule bootstrap:
    input:
        # The team is measured during the cold start, and may search.
        retriever_of,
        validation="<results>/{run}/tasks/validation.parquet",
        model="<results>/{run}/base/config.json",
    output:
        done="<results>/{run}/bootstrap/bootstrap.json",
    log:
        "<results>/{run}/logs/bootstrap.log",
    benchmark:
        "<results>/{run}/benchmarks/bootstrap.jsonl"
    wildcard_constraints:
        run=SUITE.cold_start_pattern,
    priority: 1
    conda:
        ENVIRONMENT
    resources:
        **cluster_resources("cold_start"),
        runtime=120,
    params:
        **config_params("cold_start"),
    message:
        "{wildcards.run}: cold start on demonstrations of every role"
    script:
        "../scripts/bootstrap.py"


rule train:
    input:
        starting_model_of,
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
        **cluster_resources("train"),
        runtime=1440,
    params:
        **config_params("train"),
    message:
        "{wildcards.run}: reinforcement learning of every policy (follow it: tail -f {log})"
    script:
        "../scripts/train.py"
