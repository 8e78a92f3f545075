"""Run all benchmarks, or some, and write their results to docs/benchmarks.md."""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
# The line that `benchmarks.support.result.print_result` prints.
RESULT_LINE = re.compile(
    r"name=(?P<name>\S+) ratio=(?P<ratio>\d+\.\d+) (?P<bound>goal|at_most)=(?P<goal>\d+\.\d+) "
    r"reference=(?P<reference>.+) n=(?P<n>\d+)"
)
HEADER = """\
# Benchmarks

`make bench` runs these benchmarks on a CPU and writes this page. [gpu.md](gpu.md) has measurements on a GPU.

Each row is a result line of the script `benchmarks/<name>.py`; `chat_turns` prints `chat_turns_16` too. The ratio
compares our measurement with that of the reference. A goal with ≥ is the smallest accepted ratio, and a goal with ≤
the largest.

The picture shows how the CPU time and the memory of a step grow with agents, turns, policies, and the sizes of groups
and prompts. Each micro-batch has room for a whole group. The legend gives the exponent of each growth. The exponents of
turns and prompts are above 1, because attention grows with the square of a sequence's length. The row `growth` has the
largest exponent with which the time of a whole step grows with its floating-point operations. `growth_nodes_2` and
`growth_nodes_4` are the CPU time of an update on two and four nodes, divided by that on one node; the nodes are network
namespaces of this machine.

![CPU time and memory over sizes](pictures/growth.png)

| benchmark | ratio | goal | reference | repeats | machine |
|---|---:|---:|---|---:|---|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result line of a benchmark.

    Attributes:
        name: name of the benchmark.
        ratio: ratio of our measurement and the reference's.
        goal: smallest accepted ratio, or the largest with `at_most`.
        at_most: True if a smaller ratio is better.
        reference: the other side of the ratio.
        n: number of repeats.
    """

    name: str
    ratio: float
    goal: float
    at_most: bool
    reference: str
    n: int


def parse(output: str) -> list[Result]:
    """Return all results in the output of a benchmark, or [] if its last line is not a result."""
    matches = [RESULT_LINE.fullmatch(line.strip()) for line in output.rstrip().splitlines()]
    if not matches or matches[-1] is None:
        return []
    return [
        Result(
            name=match["name"],
            ratio=float(match["ratio"]),
            goal=float(match["goal"]),
            at_most=match["bound"] == "at_most",
            reference=match["reference"],
            n=int(match["n"]),
        )
        for match in matches
        if match is not None
    ]


def page(results: Sequence[Result], machine: str, previous: str = "") -> str:
    """Return the Markdown page.

    Args:
        results: new results.
        machine: description of the machine that measured them.
        previous: the page so far, whose rows of other benchmarks are kept.
    """
    rows = {
        match[1]: match[0] for match in re.finditer(r"^\| (\w+) \| \d.*$", previous, re.MULTILINE)
    }
    for result in results:
        sign = "≤" if result.at_most else "≥"
        rows[result.name] = (
            f"| {result.name} | {result.ratio:.2f} | {sign} {result.goal:.2f} | {result.reference} | "
            f"{result.n} | {machine} |"
        )
    lines = [row for _, row in sorted(rows.items())]
    return HEADER + "\n".join([*lines, ""])


def run_benchmark(script: Path) -> list[Result]:
    """Run a script, print its output, and return its results; they are empty if it failed."""
    began = time.monotonic()
    command = [sys.executable, str(script)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(process.stdout.rstrip())
    results = parse(process.stdout) if process.returncode == 0 else []
    if not results:
        print(f"error: {script.name} ended with status {process.returncode} and no result line")
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return results


def describe_machine() -> str:
    """Return the CPU model, the number of cores and the version of Python."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    model = match[1] if match else platform.machine()
    cores = cpuinfo.count("processor\t")
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def main() -> int:
    """Run benchmarks and write the page; if one fails, return 1 and leave the page unchanged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts without .py; all if none is named")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    scripts = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    del scripts[Path(__file__).stem]
    unknown = sorted(set(options.names) - scripts.keys())
    if unknown:
        print(f"error: no benchmark {', '.join(unknown)}; known: {', '.join(scripts)}")
        return 1

    results = []
    failed = []
    for name, script in scripts.items():
        if options.names and name not in options.names:
            continue
        new_results = run_benchmark(script)
        results += new_results
        if not new_results:
            failed.append(script.name)
    if failed:
        print(f"error: {', '.join(failed)} failed; {options.out} is unchanged")
        return 1

    previous = ""
    if options.names and options.out.is_file():
        previous = options.out.read_text(encoding="utf-8")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(results, describe_machine(), previous), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
