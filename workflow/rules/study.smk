# Studies: comparisons of a suite's runs over seeds. They are not part of `all`; name one as a target.


rule study_stability:
    input:
        scores=expand(
            "<results>/{run}/evaluation/{state}.json", run=SUITE.runs, state=["base", "trained"]
        ),
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
    message:
        "{config[suite]}: compare the estimators over seeds"
    script:
        "../scripts/study_stability.py"
