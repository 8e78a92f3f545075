# `snakemake` in this folder runs the pipeline; its table of contents is workflow/Snakefile.
include: "workflow/Snakefile"


workflow.default_target = "all"  # a file that is included cannot set it
