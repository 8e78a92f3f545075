"""CPU seconds of a trainer's update with freed memory kept (as a run on a CPU sets it) and with glibc's defaults.

One trainer of one rank for each, in a Ray actor as in a run: 8 prompts of 128 tokens with 8 replies of 64.
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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.groups import responses
from benchmarks.support.training import LR, make_model
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.local_ray import KEEP_PAGES, running_ray
from mcore_mas.runtime.trainer_group import TrainerGroup

_VOCAB, _HIDDEN, _LAYERS, _WARM = 4096, 384, 4, 2


async def updates(repeats: int, *, keep: bool) -> None:
    """Print the least CPU seconds of an update, the page faults in it, and the rank's resident MiB at the end."""
    with tempfile.TemporaryDirectory() as folder, running_ray(1, 200, keep_pages=keep):
        make_model(Path(folder), vocab=_VOCAB, hidden=_HIDDEN, layers=_LAYERS)
        group = TrainerGroup(
            "policy", TrainerSpec(model=folder, lr=LR, objective=Objective()), threads=1
        )
        await group.ready()
        batches = pack(responses(_VOCAB, prompts=8, prompt=128), 16384)
        rank = next(
            p
            for p in psutil.Process().children(recursive=True)
            if p.cmdline()[:1] == ["ray::TrainerRank"]
        )
        spent = []
        for _ in range(_WARM + repeats):
            before = cost(rank)
            await group.update(batches)
            spent.append(tuple(b - a for a, b in zip(before, cost(rank), strict=True)))
        seconds, faults = min(spent[_WARM:])
        print(seconds, faults, rank.memory_info().rss >> 20)


def cost(process: psutil.Process) -> tuple[float, int]:
    """CPU seconds and minor page faults so far."""
    times = process.cpu_times()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return times.user + times.system, int(fields[7])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=("keep", "default"), help="only run one")
    options = parser.parse_args()
    if options.kind:
        asyncio.run(updates(options.repeats, keep=options.kind == "keep"))
        return
    seconds = {}
    for kind in ("keep", "default"):
        environment = {name: value for name, value in os.environ.items() if name not in KEEP_PAGES}
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--kind",
            kind,
            "--repeats",
            str(options.repeats),
        ]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds[kind], faults, resident = (float(word) for word in done.stdout.split()[-3:])
        print(
            f"{kind}: {seconds[kind]:.2f} CPU s, {faults:.0f} page faults, {resident:.0f} MiB resident"
        )
    ratio = seconds["default"] / seconds["keep"]
    print(
        f"name=page_reuse ratio={ratio:.2f} goal=1.10 reference=glibc_defaults n={options.repeats}"
    )


if __name__ == "__main__":
    main()
