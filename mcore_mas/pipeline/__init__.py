"""Stages of the Snakemake pipeline: suites of runs, data preparation, cold start, report."""
