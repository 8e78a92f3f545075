"""CPU time of a first `snakemake -n` of all published experiments, over that of a workflow with as many plain jobs.

The reference has rules without configs: what Snakemake takes for itself. The worse of two is counted: the scale tiny,
and each run placed on eight GPUs (there, what is not on this machine is said before jobs are counted).
"""

import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

REPEATS, GOAL = 3, 3.5
SNAKEFILE = Path(__file__).resolve().parents[1] / "workflow" / "Snakefile"
PLAIN = """
rule all:
    input: expand("{{i}}.txt", i=range({jobs}))
rule one:
    output: "{{i}}.txt"
    shell: "touch {{output}}"
"""


def dry_run(snakefile: Path, *arguments: str) -> tuple[float, int]:
    """(CPU seconds of `snakemake -n` in an empty folder, its jobs)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(snakefile),
            "-n",
            *arguments,
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    jobs = re.search(r"^total +(\d+)$", done.stdout + done.stderr, re.MULTILINE)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, int(
        jobs[1]
    ) if jobs else 0


def main() -> None:
    """Takes the median of each."""
    tiny = [dry_run(SNAKEFILE, "tables", "--config", "scale=tiny") for _ in range(REPEATS)]
    placed = [dry_run(SNAKEFILE, "tables", "--config", "gpus=8xH100")[0] for _ in range(REPEATS)]
    with TemporaryDirectory() as folder:
        plain = Path(folder, "Snakefile")
        plain.write_text(PLAIN.format(jobs=tiny[0][1] - 1))
        alone = statistics.median(dry_run(plain)[0] for _ in range(REPEATS))
    ours = {
        "tiny": statistics.median(seconds for seconds, _ in tiny),
        "gpus=8xH100": statistics.median(placed),
    }
    print(
        f"{tiny[0][1]} jobs; CPU seconds: {', '.join(f'{k} {v:.1f}' for k, v in ours.items())}; plain {alone:.1f}"
    )
    print(
        f"name=dry_run ratio={max(ours.values()) / alone:.2f} at_most={GOAL:.2f} reference=plain_workflow n={REPEATS}"
    )


if __name__ == "__main__":
    main()
