"""Measure the trainer on one GPU, in sections that are processes with a deadline, the most important first.

    python -m benchmarks.gpu --budget 540 --out DIR [--only probe,attention] [--tiny]
    python -m benchmarks.gpu --page            docs/gpu.md from benchmarks/gpu/results.jsonl

Every figure is written to DIR/results.jsonl as soon as it is known. A section that cannot run (without
a GPU, Triton or time) writes a line with the reason. The last line names the sections that failed or
computed something wrong; the exit status is then 1. The kit needs torch, triton and
requirements/gpu-kit.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().with_name("results.jsonl")
PAGE = ROOT / "docs" / "gpu.md"
# Keys of a result line that say which check or case it is of.
_CASE_KEYS = ("what", "layout", "dtype", "model", "transport")
_SHOWN_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class Section:
    """Part of the kit: the seconds that it may take, and the command that prints its result lines.

    Attributes:
        needs: sections without which this one cannot succeed.
    """

    seconds: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


_SECTION_SECONDS = {  # the most important sections first
    "probe": 40,
    "correctness": 180,
    "updates": 240,
    "transformer_engine": 150,
    "attention": 90,
    "head": 60,
    "hand_over": 90,
    "engine": 90,
    "profile": 60,
    "meter": 90,
}
SECTIONS: dict[str, Section] = {
    name: Section(seconds, (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.sections", name))
    for name, seconds in _SECTION_SECONDS.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run sections, or write the page; return 1 if a section failed or computed something wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, metavar="SECONDS", help="for all sections together"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results.jsonl")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help=f"of {', '.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a GPU or on the CPU")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md instead")
    options = parser.parse_args(arguments)
    if options.page:
        from benchmarks.gpu.page import page

        PAGE.write_text(page(read(RESULTS)), encoding="utf-8")
        return 0

    sections = select_sections(parser, options.only, SECTIONS)
    if options.out is None:
        parser.error("--out: a folder for results.jsonl is needed")
    if not options.budget > 0:
        parser.error(f"--budget: {options.budget:g} seconds; it must be above 0")
    if options.tiny and not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # runs Triton's kernels on the CPU
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "results.jsonl").open("a", encoding="utf-8") as out:
        wrong = run(sections, options.budget, out, ("--tiny",) if options.tiny else ())
        note(out, {"section": "", "wrong": wrong})
    return 1 if wrong else 0


def select_sections(
    parser: argparse.ArgumentParser, only: str, sections: Mapping[str, Section]
) -> dict[str, Section]:
    """Return the sections that `only` names, separated by commas, or all; exit for an unknown name."""
    names = [name for name in only.split(",") if name] or list(sections)
    unknown = [name for name in names if name not in sections]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}; there are {', '.join(sections)}")
    return {name: section for name, section in sections.items() if name in names}


def run(
    sections: dict[str, Section], budget: float, out: TextIO, options: Sequence[str] = ()
) -> list[str]:
    """Run sections one after the other, and write each result line at once.

    Args:
        sections: sections by name.
        budget: seconds for all sections together.
        out: the results file.
        options: further arguments of every section.

    Returns:
        Name of each section that failed, and name and case of each wrong result.
    """
    end = time.monotonic() + budget
    wrong: list[str] = []
    failed: set[str] = set()
    for name, section in sections.items():
        began = time.monotonic()
        remaining = end - began
        if remaining < 1:
            note(out, {"section": name, "skipped": f"the budget of {budget:g} s is spent"})
            continue
        failed_needs = [needed for needed in section.needs if needed in failed]
        if failed_needs:
            note(out, {"section": name, "skipped": f"{failed_needs[0]} failed"})
            continue
        timeout_s = min(section.seconds, remaining)
        for line in lines_of((*section.command, *options), timeout_s):
            note(out, {"section": name, **line})
            if "failed" in line or line.get("ok") is False:
                failed.add(name)
                case = " ".join(str(line[key]) for key in _CASE_KEYS if key in line)
                label = f"{name}: {case}" if case else name
                if label not in wrong:
                    wrong.append(label)
        note(out, {"section": name, "seconds": round(time.monotonic() - began, 1)})
    return wrong


def lines_of(command: Sequence[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that a program prints.

    If it fails, or is killed because it has not ended in time, the last one has the reason as `failed`.
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    error_lines: list[str] = []
    error_reader = threading.Thread(target=error_lines.extend, args=(child.stderr,), daemon=True)
    is_late = threading.Event()

    def end_late_child() -> None:
        is_late.set()
        end_group(child)

    timer = threading.Timer(timeout_s, end_late_child)
    error_reader.start()
    timer.start()
    try:
        for line in child.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value
        child.wait()
    finally:  # also if the caller stops reading
        timer.cancel()
        end_group(child)
        child.wait()
    error_reader.join(5)
    if is_late.is_set():
        yield {"failed": f"not done after {timeout_s:.0f} s"}
    elif child.returncode:
        messages = [line.strip() for line in error_lines if line.strip()]
        message = messages[-1] if messages else f"exit status {child.returncode}"
        yield {"failed": message[:_SHOWN_ERROR_CHARS]}


def end_group(child: subprocess.Popen[str]) -> None:
    """Kill the process group of a child."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def note(out: TextIO, line: dict[str, Any]) -> None:
    """Write a result line to disk, and print it."""
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), **line})
    out.write(text + "\n")
    out.flush()
    os.fsync(out.fileno())
    print(text, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file; [] if there is no file."""
    if not path.is_file():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


if __name__ == "__main__":
    sys.exit(main())
