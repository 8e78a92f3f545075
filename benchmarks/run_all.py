"""Runs every benchmark, or some, and writes their rows of docs/benchmarks.md from the results that each prints."""

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

HERE = Path(__file__).resolve().parent
LINE = re.compile(
    r"name=(?P<name>\S+) ratio=(?P<ratio>\d+\.\d+) (?P<sense>goal|at_most)=(?P<goal>\d+\.\d+) "
    r"reference=(?P<reference>.+) n=(?P<n>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one benchmark measured."""

    name: str
    ratio: float  # ours over the reference's
    goal: float
    at_most: bool  # the goal is the most that it may be, not the least
    reference: str
    n: int  # repeats


def parse(output: str) -> list[Result]:
    """The results in a benchmark's output, a line each; none if its last line is not of the agreed form."""
    lines = output.rstrip().splitlines()
    found = [match for line in lines if (match := LINE.fullmatch(line.strip()))]
    if not lines or not LINE.fullmatch(lines[-1].strip()):
        return []
    return [
        Result(
            name=match["name"],
            ratio=float(match["ratio"]),
            goal=float(match["goal"]),
            at_most=match["sense"] == "at_most",
            reference=match["reference"],
            n=int(match["n"]),
        )
        for match in found
    ]


def page(results: Sequence[Result], machine: str, before: str = "") -> str:
    """The Markdown page, `machine` in the rows of `results`; the others are those of the page `before`."""
    rows = {row[1]: row[0] for row in re.finditer(r"^\| (\w+) \| \d.*$", before, re.MULTILINE)}
    for r in results:
        goal = f"{'≤' if r.at_most else '≥'} {r.goal:.2f}"
        rows[r.name] = f"| {r.name} | {r.ratio:.2f} | {goal} | {r.reference} | {r.n} | {machine} |"
    lines = [
        "# Benchmarks",
        "",
        "`make bench` writes this page. Each row is a line that the script `benchmarks/<name>.py` prints",
        "(`chat_turns_16`: of `chat_turns`).",
        "",
        "These are of CPUs; [gpu.md](gpu.md) has what was measured on a GPU.",
        "",
        "The picture (`growth`) says how CPU time and memory of a step grow with agents, turns, groups, prompts and",
        "policies. Each micro-batch has room for a group. The legend has the exponent of the growth with size. Those",
        "of turns and prompts are above 1, as attention grows with the square of a sequence. The row has the",
        "largest exponent of a whole step's time with its operations.",
        "",
        "![CPU time and memory over sizes](pictures/growth.png)",
        "",
        "| benchmark | ratio | goal | reference | repeats | machine |",
        "|---|---:|---:|---|---:|---|",
    ]
    return "\n".join([*lines, *(row for _, row in sorted(rows.items())), ""])


def main() -> int:
    """Run all, or those named on the command line; 1 if one failed, and then the page stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts without .py; all if none is named")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    options = parser.parse_args()
    scripts = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    unknown = set(options.names) - {path.stem for path in scripts}
    if unknown:
        print(
            f"error: no benchmark {', '.join(sorted(unknown))}; known: {', '.join(p.stem for p in scripts)}"
        )
        return 1
    results, failed = [], []
    for script in [path for path in scripts if not options.names or path.stem in options.names]:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout.rstrip())
        found = parse(done.stdout) if done.returncode == 0 else []
        results += found
        if not found:
            failed.append(script.name)
            print(f"error: {script.name} ended with status {done.returncode} and no result line")
        print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    if failed:
        print(f"error: {', '.join(failed)} failed; {options.out} is unchanged")
        return 1
    before = (
        options.out.read_text(encoding="utf-8") if options.names and options.out.is_file() else ""
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(results, _machine(), before), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


def _machine() -> str:
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    cores = Path("/proc/cpuinfo").read_text(encoding="utf-8").count("processor\t")
    return f"{model[1] if model else platform.machine()}, {cores} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    raise SystemExit(main())
