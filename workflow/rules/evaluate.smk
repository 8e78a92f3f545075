# Evaluation: scores of a run's team on held-out tasks, before training, after it, and with other
# models playing some of the agents (cross-play).


rule evaluate:
    input:
        evaluated_models_of,
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
        **cluster_resources("evaluate"),
        runtime=240,
    params:
        **config_params("evaluate"),
        seats=lambda wildcards: SUITE.seats(wildcards.run, wildcards.state),
    message:
        "{wildcards.run}: evaluate the {wildcards.state} team"
    script:
        "../scripts/evaluate.py"
