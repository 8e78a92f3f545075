"""CPU time of a trainer's update if freed memory is kept (as runs on a CPU do), against glibc's defaults.

The trainer has one rank, in a Ray actor as in a run. An update has 8 prompts of 128 tokens with 8
replies of 64.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import responses
from benchmarks.support.result import print_result
from benchmarks.support.training import LR, make_model
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.local_ray import KEEP_PAGES, running_ray
from mcore_mas.runtime.trainer_group import TrainerGroup

_VOCAB = 4096
_HIDDEN = 384
_LAYERS = 4
_WARM_UPS = 2
_GOAL = 1.1


async def run_updates(repeats: int, *, keep: bool) -> None:
    """Print the CPU seconds and page faults of the fastest update, and the rank's resident MiB at the end."""
    with tempfile.TemporaryDirectory() as folder, running_ray(1, 200, keep_pages=keep):
        make_model(Path(folder), vocab=_VOCAB, hidden=_HIDDEN, layers=_LAYERS)
        spec = TrainerSpec(model=folder, lr=LR, objective=Objective())
        group = TrainerGroup("policy", spec, threads=1)
        await group.ready()
        batches = pack(responses(_VOCAB, prompts=8, prompt_tokens=128), 16384)
        rank = find_rank()
        updates = []
        for _ in range(_WARM_UPS + repeats):
            seconds_before, faults_before = cpu_and_faults(rank)
            await group.update(batches)
            seconds, faults = cpu_and_faults(rank)
            updates.append((seconds - seconds_before, faults - faults_before))
        seconds, faults = min(updates[_WARM_UPS:])
        print(seconds, faults, rank.memory_info().rss >> 20)


def find_rank() -> psutil.Process:
    """Return the process of the trainer's rank."""
    for process in psutil.Process().children(recursive=True):
        if process.cmdline()[:1] == ["ray::TrainerRank"]:
            return process
    raise RuntimeError("Ray has started no process of a rank")


def cpu_and_faults(process: psutil.Process) -> tuple[float, int]:
    """Return the CPU seconds and minor page faults of a process so far."""
    times = process.cpu_times()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return times.user + times.system, int(fields[7])


def measure(kind: str, repeats: int) -> float:
    """Run `run_updates` in a new process; return the CPU seconds of the fastest update."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
    command = [sys.executable, "-W", "ignore", __file__, "--kind", kind]
    command += ["--repeats", str(repeats)]
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, faults, resident_mib = map(float, process.stdout.split()[-3:])
    print(f"{kind}: {seconds:.2f} CPU s, {faults:.0f} page faults, {resident_mib:.0f} MiB resident")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=("keep", "default"), help="only run one")
    options = parser.parse_args()
    if options.kind:
        asyncio.run(run_updates(options.repeats, keep=options.kind == "keep"))
        return
    keep_s = measure("keep", options.repeats)
    default_s = measure("default", options.repeats)
    print_result(
        "page_reuse",
        default_s / keep_s,
        goal=_GOAL,
        reference="glibc_defaults",
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
