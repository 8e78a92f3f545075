# Results for readers: the table, the curves, and Snakemake's HTML report that contains both.


rule make_table:
    input:
        scores=expand("<results>/{evaluation}.json", evaluation=SUITE.evaluations),
    output:
        csv="<results>/tables/{suite}.csv",
        markdown="<results>/tables/{suite}.md",
        html=report(
            "<results>/tables/{suite}.html",
            caption="../report/table.rst",
            category="Results",
            labels={"result": "table"},
        ),
        runs=report(
            "<results>/tables/{suite}.runs.html",
            caption="../report/runs.rst",
            category="Results",
            labels={"result": "runs: jobs, settings, conversations"},
        ),
    log:
        "<results>/logs/make_table_{suite}.log",
    benchmark:
        "<results>/benchmarks/make_table_{suite}.jsonl"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=500,
        runtime=10,
    params:
        experiments=SUITE.experiments,
    message:
        "{wildcards.suite}: make the table"
    script:
        "../scripts/make_table.py"


rule plot_curves:
    input:
        done=expand("<results>/{run}/train/done.json", run=SUITE.runs),
    output:
        page=report(
            "<results>/figures/{suite}/charts.html",
            caption="../report/charts.rst",
            category="Curves",
            labels={"curve": "all runs and agents"},
        ),
    log:
        "<results>/logs/plot_curves_{suite}.log",
    benchmark:
        "<results>/benchmarks/plot_curves_{suite}.jsonl"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=500,
        runtime=10,
    message:
        "{wildcards.suite}: plot the curves"
    script:
        "../scripts/plot_curves.py"


rule report:
    input:
        table=f"<results>/tables/{SUITE.name}.html",
        runs=f"<results>/tables/{SUITE.name}.runs.html",
        charts=f"<results>/figures/{SUITE.name}/charts.html",
    output:
        html=f"<results>/reports/{SUITE.name}.html",
    log:
        f"<results>/logs/report_{SUITE.name}.log",
    benchmark:
        f"<results>/benchmarks/report_{SUITE.name}.jsonl"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        suite=config,
    message:
        "write the HTML report with the table and the curves"
    script:
        "../scripts/report.py"
