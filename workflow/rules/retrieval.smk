# Retrieval: the index of a run's retrieval server, and a probe of that server. An index depends on
# the settings of the stage `tasks`, which include its passages, its encoder and its kind.


rule encode_shard:
    input:
        passages="<results>/{run}/tasks/passages.jsonl",
    output:
        vectors=temp("<results>/{run}/index/shards/{number}-of-{shards}.f32"),
    log:
        "<results>/{run}/logs/encode_shard_{number}-of-{shards}.log",
    benchmark:
        "<results>/{run}/benchmarks/encode_shard_{number}-of-{shards}.jsonl"
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=True),
        number=r"\d{4}",
        shards=r"\d{4}",
    conda:
        ENVIRONMENT
    resources:
        **cluster_resources("index"),
        runtime=720,
    params:
        **config_params("tasks"),
    message:
        "{wildcards.run}: encode shard {wildcards.number} of {wildcards.shards}"
    script:
        "../scripts/encode_shard.py"


rule build_index:
    input:
        shards_of,
        passages="<results>/{run}/tasks/passages.jsonl",
    output:
        manifest="<results>/{run}/index/index.json",
    log:
        "<results>/{run}/logs/build_index.log",
    benchmark:
        "<results>/{run}/benchmarks/build_index.jsonl"
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=True),
    conda:
        ENVIRONMENT
    resources:
        **cluster_resources("index"),
        runtime=720,
    params:
        **config_params("tasks"),
    message:
        "{wildcards.run}: build the index of the passages"
    script:
        "../scripts/build_index.py"


rule probe_retriever:
    input:
        manifest=lambda wildcards: SUITE.index_manifest(wildcards.run),
    output:
        probe="<results>/{run}/retriever.json",
        page=report(
            "<results>/{run}/retriever.html",
            caption="../report/retriever.rst",
            category="Retrieval",
            labels={"run": "{run}"},
        ),
    log:
        "<results>/{run}/logs/probe_retriever.log",
    benchmark:
        "<results>/{run}/benchmarks/probe_retriever.jsonl"
    wildcard_constraints:
        # All runs that make their tasks. The others use or link the probe of another run.
        run=f"{SUITE.run_pattern(builds_index=True)}|{SUITE.run_pattern(builds_index=False)}",
    conda:
        ENVIRONMENT
    resources:
        **cluster_resources("index"),
        runtime=60,
    params:
        **config_params("tasks"),
    message:
        "{wildcards.run}: probe the retrieval server"
    script:
        "../scripts/probe_retriever.py"


rule share_index:
    input:
        lambda wildcards: files_of_owner(
            wildcards, "retriever.json", "index/index.json", "tasks/passages.jsonl"
        ),
        tasks=tasks_of_owner,
    output:
        **TASKS,
        probe="<results>/{run}/retriever.json",
        manifest="<results>/{run}/index/index.json",
        passages="<results>/{run}/tasks/passages.jsonl",
    log:
        "<results>/{run}/logs/share_index.log",
    wildcard_constraints:
        run=SUITE.run_pattern(builds_index=True, links_tasks=True),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=100,
        runtime=5,
    params:
        owner=subpath(input[0], parent=True),
        run=subpath(output.probe, parent=True),
    message:
        "{wildcards.run}: link the tasks and the index of {input[0]}"
    shell:
        # The links are symbolic for the same reason as in the rule share_tasks.
        "mkdir -p {params.run:q}/index {params.run:q}/tasks; ( "
        "ln --symbolic --relative --force {params.owner:q}/retriever.json {params.run:q}; "
        "ln --symbolic --relative --force {params.owner:q}/index/* {params.run:q}/index; "
        "ln --symbolic --relative --force {params.owner:q}/tasks/* {params.run:q}/tasks "
        ") 2> {log:q}"
