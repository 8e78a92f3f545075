# The score of a run's team on held-out tasks: before training, after it, and with other models in some seats.


rule evaluate:
    input:
        weights_of,
        retriever_of,
        test="<results>/{run}/tasks/test.parquet",
    output:
        scores="<results>/{run}/evaluation/{state}.json",
    log:
        "<results>/{run}/logs/evaluate_{state}.log",
    benchmark:
        "<results>/{run}/benchmarks/evaluate_{state}.jsonl"
    conda:
        ENVIRONMENT
    resources:
        **needs_of("evaluate"),
        runtime=240,
    params:
        **settings_of("score"),
        seats=lambda wildcards: SUITE.seats(wildcards.run, wildcards.state),
    message:
        "{wildcards.run}: evaluate the {wildcards.state} team"
    script:
        "../scripts/evaluate.py"
