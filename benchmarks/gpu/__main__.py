"""Measures the trainer on one GPU, the most important first, each section in a process of its own with a deadline.

    python -m benchmarks.gpu --budget 540 --out DIR [--only probe,attention] [--tiny]
    python -m benchmarks.gpu --page            docs/gpu.md from benchmarks/gpu/results.jsonl

Every figure is a line of DIR/results.jsonl as soon as it is known. What is missing here (a GPU, Triton, time) is a line
that says so. The last line names what failed, and what was computed wrong; the exit status is 1 if anything did. It
needs torch, triton and requirements/gpu-kit.txt.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PAGE = HERE / "results.jsonl", ROOT / "docs" / "gpu.md"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the kit: how long it may take, and the program that prints its lines."""

    seconds: float
    command: tuple[str, ...]


def _own(name: str) -> tuple[str, ...]:
    return (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.sections", name)


SECTIONS: dict[str, Section] = {  # the most important first
    "probe": Section(40, _own("probe")),
    "correctness": Section(180, _own("correctness")),
    "updates": Section(240, _own("updates")),
    "attention": Section(90, _own("attention")),
    "head": Section(60, _own("head")),
    "hand_over": Section(90, _own("hand_over")),
    "engine": Section(90, _own("engine")),
    "profile": Section(60, _own("profile")),
    "meter": Section(90, _own("meter")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that were asked for; the exit status is 1 if one failed."""
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
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, on whatever device is here"
    )
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md instead")
    given = parser.parse_args(arguments)
    if given.page:
        from benchmarks.gpu.page import page

        PAGE.write_text(page(read(RESULTS)), encoding="utf-8")
        return 0
    names = [name for name in given.only.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if given.out is None:
        parser.error("--out: a folder for results.jsonl is needed")
    if not given.budget > 0:
        parser.error(f"--budget: {given.budget:g} seconds; it must be above 0")
    if given.tiny and not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in its interpreter
    given.out.mkdir(parents=True, exist_ok=True)
    sections = {name: SECTIONS[name] for name in SECTIONS if name in names}
    with (given.out / "results.jsonl").open("a", encoding="utf-8") as out:
        wrong = run(sections, given.budget, out, ("--tiny",) if given.tiny else ())
        note(out, {"section": "", "wrong": wrong})
    return 1 if wrong else 0


def run(
    sections: dict[str, Section], budget: float, out: TextIO, options: Sequence[str] = ()
) -> list[str]:
    """Write the lines of all sections, flushed one by one; says which of them failed or told of something wrong."""
    end = time.monotonic() + budget
    wrong: dict[str, None] = {}
    for name, section in sections.items():
        began, left = time.monotonic(), end - time.monotonic()
        if left < 1:
            note(out, {"section": name, "skipped": f"the budget of {budget:g} s is spent"})
            continue
        deadline = min(section.seconds, left)
        for line in lines_of((*section.command, *options), deadline):
            note(out, {"section": name, **line})
            if "failed" in line or line.get("ok") is False:
                of = (
                    str(line[key])
                    for key in ("what", "layout", "dtype", "model", "transport")
                    if key in line
                )
                wrong[": ".join([name, *filter(None, [" ".join(of)])])] = None
        note(out, {"section": name, "seconds": round(time.monotonic() - began, 1)})
    return list(wrong)


def lines_of(command: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """What a program prints as JSON objects, as it comes; and how it failed, if it did."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    said: list[str] = []
    listener = threading.Thread(target=said.extend, args=(child.stderr,), daemon=True)
    late = threading.Event()

    def end_late() -> None:
        late.set()
        end_group(child)

    timer = threading.Timer(deadline, end_late)
    listener.start()
    timer.start()
    try:
        for line in child.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
        child.wait()
    finally:  # also where the reader is interrupted
        timer.cancel()
        end_group(child)
        child.wait()
    listener.join(5)
    if late.is_set():
        yield {"failed": f"not done after {deadline:.0f} s"}
    elif child.returncode:
        last = [line.strip() for line in said if line.strip()] or [
            f"exit status {child.returncode}"
        ]
        yield {"failed": last[-1][:500]}


def end_group(child: subprocess.Popen[str]) -> None:
    """End a child and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def note(out: TextIO, line: dict[str, Any]) -> None:
    """Write a line where it stays, and show it."""
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), **line})
    out.write(text + "\n")
    out.flush()
    os.fsync(out.fileno())
    print(text, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none if it is not there."""
    if not path.is_file():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


if __name__ == "__main__":
    sys.exit(main())
