# Studies: comparisons of a suite's runs over seeds. They are not part of `all`; name one as a target.


rule study_stability:
    input:
        # The runs of a seed that start from the same models share an evaluation of these.
        base=expand(
            "<results>/{run}/evaluation/base.json",
            run=dict.fromkeys(SUITE.base_evaluation_owner.values()),
        ),
        trained=expand("<results>/{run}/evaluation/trained.json", run=SUITE.runs),
        done=expand("<results>/{run}/train/done.json", run=SUITE.runs),
    output:
        csv=f"<results>/tables/{SUITE.name}_study.csv",
        markdown=f"<results>/tables/{SUITE.name}_study.md",
    log:
        f"<results>/logs/study_stability_{SUITE.name}.log",
    benchmark:
        f"<results>/benchmarks/study_stability_{SUITE.name}.jsonl"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=500,
        runtime=10,
    params:
        runs=SUITE.runs,
        base_evaluation_owner=SUITE.base_evaluation_owner,
    message:
        "{config[suite]}: compare the estimators over seeds"
    script:
        "../scripts/study_stability.py"
