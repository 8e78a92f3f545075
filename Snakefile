# `snakemake` in this folder runs the pipeline. workflow/Snakefile lists its stages.
include: "workflow/Snakefile"


workflow.default_target = "all"  # An included file cannot set the default target.
