"""Acceptance test of several GPUs: NCCL, layouts, Transformer Engine, SGLang, a training by every transport.

    python -m benchmarks.gpu.acceptance --out DIR [--sglang PYTHON] [--only nccl,layouts] [--cpu]

Each section is a process with a deadline. Every result is written to DIR/results.jsonl as soon as it
is known; a section that cannot run writes a line with the reason. The last line says passed, failed,
or nothing measured; the exit status is 1 if a section failed. With --cpu the sections run on gloo,
which tests this program and not the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.__main__ import ROOT, Section, note, read, run, select_sections


def _section(seconds: float, *arguments: str) -> Section:
    module = "benchmarks.gpu.acceptance_sections"
    return Section(seconds, (sys.executable, "-W", "ignore", "-m", module, *arguments))


SECTIONS: dict[str, Section] = {
    "machine": _section(60, "machine"),
    "nccl": _section(180, "nccl"),
    "layouts": _section(600, "layouts"),
    "te": _section(300, "te"),
    "sglang": _section(900, "sglang"),
    "disk": _section(1800, "training", "disk"),
    "distributed": _section(1800, "training", "distributed"),
    "tensor": _section(1800, "training", "tensor"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run sections; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.acceptance", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of results.jsonl"
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help=f"of {', '.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument(
        "--sglang", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python", metavar="PYTHON"
    )
    parser.add_argument("--cpu", action="store_true", help="run on gloo, to test this program")
    parsed = parser.parse_args(arguments)
    sections = select_sections(parser, parsed.only, SECTIONS)
    options = ["--sglang", str(parsed.sglang.absolute())]
    if parsed.cpu:
        options.append("--cpu")
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / "results.jsonl"
    path.unlink(missing_ok=True)
    with path.open("a", encoding="utf-8") as out:
        budget = sum(section.seconds for section in sections.values())
        run(sections, budget, out, options)
        lines = read(path)
        failed = {line["section"] for line in lines if "failed" in line or line.get("ok") is False}
        passed = {line["section"] for line in lines if line.get("ok")} - failed
        skipped = {line["section"] for line in lines if "skipped" in line}
        result = "passed" if passed else "nothing measured"
        if failed:
            result = "failed"
        note(
            out,
            {
                "result": result,
                "passed": sorted(passed),
                "failed": sorted(failed),
                "skipped": sorted(skipped),
            },
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
