"""Acceptance of a machine with several GPUs: NCCL, layouts, Transformer Engine, SGLang, a training by every transport.

    python -m benchmarks.gpu.acceptance --out DIR [--sglang PYTHON] [--only nccl,layouts] [--cpu]

Each section is a process with a deadline, and every finding a line of DIR/results.jsonl as soon as it is known. What
cannot run here is a line that says why. The last line's word is passed, failed, or nothing measured; the exit status is
1 if something failed. With --cpu sections run over gloo, which tries this program and says nothing of GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.__main__ import ROOT, Section, note, read, run


def _own(seconds: float, *arguments: str) -> Section:
    return Section(
        seconds,
        (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.acceptance_sections", *arguments),
    )


SECTIONS: dict[str, Section] = {
    "machine": _own(60, "machine"),
    "nccl": _own(180, "nccl"),
    "layouts": _own(600, "layouts"),
    "te": _own(300, "te"),
    "sglang": _own(900, "sglang"),
    "disk": _own(1800, "training", "disk"),
    "changed": _own(1800, "training", "changed"),
    "distributed": _own(1800, "training", "distributed"),
    "tensor": _own(1800, "training", "tensor"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that were asked for; the exit status is 1 if one failed."""
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
    parser.add_argument("--cpu", action="store_true", help="over gloo, to try this program")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.jsonl"
    path.unlink(missing_ok=True)
    options = ("--sglang", str(given.sglang.absolute()), *(("--cpu",) if given.cpu else ()))
    with path.open("a", encoding="utf-8") as out:
        sections = {name: SECTIONS[name] for name in SECTIONS if name in names}
        run(sections, sum(section.seconds for section in sections.values()), out, options)
        lines = read(path)
        skipped = {line["section"]: line["skipped"] for line in lines if "skipped" in line}
        failed = sorted(
            {line["section"] for line in lines if "failed" in line or line.get("ok") is False}
        )
        ok = sorted({line["section"] for line in lines if line.get("ok")} - set(failed))
        word = "failed" if failed else "passed" if ok else "nothing measured"
        note(out, {"result": word, "passed": ok, "failed": failed, "skipped": sorted(skipped)})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
