"""Run whole trainings on one GPU, in sections that each have a process and a deadline.

    python -m benchmarks.gpu.whole_run --kit .gpu --out results/gpu-run [--budget 490] [--only train,evaluate]
    python -m benchmarks.gpu.whole_run --kit .gpu --out DIR --device cpu --small

`--kit` is a folder of `benchmarks.gpu.run_kit`. Every figure is a line of OUT/results.jsonl as soon
as it is known, and OUT/logs.tar.xz has the logs and configs of the trainings. The last lines list
the sections with their seconds and errors; the exit status is 1 if a section failed. Without a GPU,
`--device cpu --small` runs the same sections with few steps and small models; the attention kernels
and the training in bfloat16 are skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import Section, note, read, run

SECTION_SECONDS = {  # the most important sections first
    "start": 120.0,  # the first import of torch may read it from a slow disk
    "train": 150.0,
    "evaluate": 70.0,
    "idle": 90.0,
    "train_bf16": 80.0,
    "published_shape": 100.0,
    "killed_rank": 120.0,
    "engine": 60.0,
    "sleep": 30.0,
    "mixture": 60.0,
    "attention": 60.0,
    "head": 40.0,
}
# Sections that would only fail if these have failed.
NEEDS = {
    "train": ("start",),
    "evaluate": ("start", "train"),
    "train_bf16": ("start",),
    "published_shape": ("start",),
    "killed_rank": ("start",),
}
LOG_SUFFIXES = (".log", ".out", ".err", ".jsonl", ".yaml")
MAX_LOG_BYTES = 4 << 20
SMALL_PATIENCE = 4.0  # a busy CPU takes longer to start a training than a GPU machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that the command line names; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.whole_run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kit", type=Path, required=True, help="folder of benchmarks.gpu.run_kit")
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl")
    parser.add_argument("--work", type=Path, help="folder of the runs; by default OUT/work")
    parser.add_argument("--budget", type=float, default=490.0, help="seconds of all sections")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few steps, small models")
    parser.add_argument("--only", default="", help="names of sections, separated by commas")
    options = parser.parse_args(arguments)

    names = options.only.split(",") if options.only else list(SECTION_SECONDS)
    if not options.budget > 0:
        parser.error(f"--budget: {options.budget:g} seconds; it must be above 0")
    unknown = [name for name in names if name not in SECTION_SECONDS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}; sections are {', '.join(SECTION_SECONDS)}")
    if not (options.kit / "demo" / "config.yaml").is_file():
        parser.error(f"--kit: {options.kit} has no demo/config.yaml; write it with `make gpu-kit`")

    options.out.mkdir(parents=True, exist_ok=True)
    work = (options.work or options.out / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    packages = install_packages(options.kit, work / "packages")
    if packages is not None:
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), inherited]))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    settings = ["--kit", str(options.kit.resolve()), "--work", str(work)]
    settings += ["--device", options.device]
    if options.small:
        settings.append("--small")
    command = (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.whole_run_sections")
    patience = SMALL_PATIENCE if options.small else 1.0
    sections = {
        name: Section(
            patience * SECTION_SECONDS[name], (*command, name, *settings), NEEDS.get(name, ())
        )
        for name in names
    }
    results = options.out / "results.jsonl"
    earlier_lines = len(read(results))
    with results.open("a", encoding="utf-8") as out:
        failed = run(sections, options.budget, out)
        note(out, {"section": "", "device": options.device, "failed_sections": failed})
    pack_logs(work / "runs", options.out / "logs.tar.xz")
    print(summary(read(results)[earlier_lines:]))
    return 1 if failed else 0


def pack_logs(runs: Path, archive: Path) -> None:
    """Pack the logs, metrics and configs of all runs, so that a failure can be read elsewhere."""
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(runs.rglob("*")):
            is_log = path.suffix in LOG_SUFFIXES and path.is_file() and not path.is_symlink()
            if is_log and path.stat().st_size <= MAX_LOG_BYTES:
                tar.add(path, arcname=str(path.relative_to(runs)))


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each section: its seconds, and "ok" or the first reason why not."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        if not line["section"]:
            continue
        row = rows.setdefault(line["section"], {"result": "ok", "seconds": 0.0})
        # The last line of a section has only its seconds; the seconds of other lines are parts of them.
        if line.keys() == {"date", "section", "seconds"}:
            row["seconds"] = line["seconds"]
        problem = line.get("failed") or line.get("skipped")
        if line.get("ok") is False:
            problem = f"wrong: {line.get('what', 'see results.jsonl')}"
        if problem and row["result"] == "ok":
            row["result"] = problem
    return "\n".join(
        f"{name:16}{row['seconds']:7.1f} s  {row['result']}" for name, row in rows.items()
    )


def install_packages(kit: Path, folder: Path) -> Path | None:
    """Install the kit's packages into a folder for PYTHONPATH.

    Returns:
        The folder; None if this Python has Ray, or if the kit has no packages.
    """
    archive = kit / "ray.tar.xz"
    if find_spec("ray") is not None or not archive.is_file():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    shutil.unpack_archive(archive, folder, filter="tar")  # keeps the mode of Ray's programs
    wheels = [str(wheel) for wheel in sorted((kit / "wheels").glob("*.whl"))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(folder)]
    subprocess.run([*command, *wheels], check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
