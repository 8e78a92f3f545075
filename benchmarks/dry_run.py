"""CPU time of a first `snakemake -n` of all published experiments, against a workflow with as many plain jobs.

The plain workflow has rules without configs, so it shows the time of Snakemake itself. The result is
the slower of two dry runs: at scale tiny, and with every run placed on eight GPUs. (The latter
reports missing inputs before it counts jobs, so the number of jobs comes from the former.)
"""

import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result

REPEATS = 3
GOAL = 3.5
SNAKEFILE = Path(__file__).resolve().parents[1] / "workflow" / "Snakefile"
PLAIN_SNAKEFILE = """
rule all:
    input: expand("{{i}}.txt", i=range({jobs}))
rule one:
    output: "{{i}}.txt"
    shell: "touch {{output}}"
"""


def dry_run(snakefile: Path, *arguments: str) -> tuple[float, int]:
    """Run `snakemake -n` in an empty folder; return its CPU seconds, and its number of jobs or 0."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "-n", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    total = re.search(r"^total +(\d+)$", process.stdout + process.stderr, re.MULTILINE)
    return cpu_s, int(total[1]) if total else 0


def main() -> None:
    """Measure each dry run several times, and compare the medians."""
    tiny = [dry_run(SNAKEFILE, "tables", "--config", "scale=tiny") for _ in range(REPEATS)]
    placed = [dry_run(SNAKEFILE, "tables", "--config", "gpus=8xH100") for _ in range(REPEATS)]
    _, jobs = tiny[0]
    with TemporaryDirectory() as folder:
        plain_snakefile = Path(folder, "Snakefile")
        plain_snakefile.write_text(PLAIN_SNAKEFILE.format(jobs=jobs - 1))
        plain = [dry_run(plain_snakefile) for _ in range(REPEATS)]
    tiny_s = statistics.median(cpu_s for cpu_s, _ in tiny)
    placed_s = statistics.median(cpu_s for cpu_s, _ in placed)
    plain_s = statistics.median(cpu_s for cpu_s, _ in plain)
    print(
        f"{jobs} jobs; CPU seconds: tiny {tiny_s:.1f}, gpus=8xH100 {placed_s:.1f}; "
        f"plain {plain_s:.1f}"
    )
    print_result(
        "dry_run",
        max(tiny_s, placed_s) / plain_s,
        goal=GOAL,
        at_most=True,
        reference="plain_workflow",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
