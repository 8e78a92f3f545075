"""The stages of the Snakemake pipeline: suites, tasks, index, cold start, logs, report."""
