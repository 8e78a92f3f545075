# Tables of papers. workflow/tables defines them and the runs of their suite; at the scale `tiny`
# their data and models are generated.
from mcore_mas.reports.paper_tables import PaperTable

TABLE_INPUTS = {
    name: paper_suite.table_inputs(PaperTable.load(name), SUITE, SEEDS) for name in TABLES
}
TINY_FILES = SUITE.tiny_files


rule make_paper_table:
    input:
        lambda wildcards: [
            path for paths in TABLE_INPUTS[wildcards.table].values() for path in paths
        ],
    output:
        csv="<results>/tables/{table}.csv",
        markdown="<results>/tables/{table}.md",
        provenance="<results>/tables/{table}.json",
        charts="<results>/figures/{table}/charts.html",
    log:
        "<results>/logs/make_paper_table_{table}.log",
    benchmark:
        "<results>/benchmarks/make_paper_table_{table}.jsonl"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        evaluations=lambda wildcards: TABLE_INPUTS[wildcards.table],
        scale=SUITE.scale,
    message:
        "table {wildcards.table}: compare our results with the paper's"
    script:
        "../scripts/make_paper_table.py"


rule make_bundle:
    input:
        "<results>/tables/{table}.csv",
        "<results>/tables/{table}.md",
        provenance="<results>/tables/{table}.json",
    output:
        bundle="<results>/tables/{table}.bundle.zip",
    log:
        "<results>/logs/make_bundle_{table}.log",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
        runtime=120,
    message:
        "bundle of table {wildcards.table}: pack its runs' records, with digests"
    script:
        "../scripts/make_bundle.py"


rule make_tiny_file:
    output:
        file="<results>/data/{file}",
    log:
        "<results>/logs/tiny/{file}.log",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=500,
        runtime=5,
    params:
        format=lambda wildcards, output: TINY_FILES[str(output.file)],
    message:
        "{output.file}: generate a few rows"
    script:
        "../scripts/make_tiny_file.py"


rule make_tiny_model:
    output:
        model="<results>/models/{model}/config.json",
    log:
        "<results>/logs/tiny/{model}.log",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
        runtime=5,
    message:
        "{output.model}: make a small random model of the same family"
    script:
        "../scripts/make_tiny_model.py"
