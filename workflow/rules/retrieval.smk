# The retriever of runs that build one: an index over the passages, and a proof that its server answers.


rule build_index:
    input:
        config="<results>/{run}/config.yaml",
        passages="<results>/{run}/tasks/passages.jsonl",
    output:
        manifest="<results>/{run}/index/index.json",
    log:
        "<results>/{run}/logs/build_index.log",
    benchmark:
        "<results>/{run}/benchmarks/build_index.jsonl"
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
    message:
        "{wildcards.run}: encode the passages and build the index"
    script:
        "../scripts/build_index.py"


rule probe_retriever:
    input:
        config="<results>/{run}/config.yaml",
        passages="<results>/{run}/tasks/passages.jsonl",
        manifest="<results>/{run}/index/index.json",
    output:
        probe="<results>/{run}/retriever.json",
    log:
        "<results>/{run}/logs/probe_retriever.log",
    benchmark:
        "<results>/{run}/benchmarks/probe_retriever.jsonl"
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    message:
        "{wildcards.run}: start the retriever and ask it"
    script:
        "../scripts/probe_retriever.py"
