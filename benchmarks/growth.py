"""CPU time and memory of a step's parts as agents, turns, groups, prompts and policies grow, and how fast they grow.

A step is what it takes to sample the last reply of every chat, to pack all turns, and to update on them. Micro-batches
have room for a group: 4096 tokens, or twice the prompt. Every axis has a process of its own, whose points come in
rising order. An exponent is the slope of log time over log size, of the upper half of the points; attention alone makes
it more than 1, as its arithmetic grows with the square of a sequence. The last line has the largest slope over the
step's floating-point operations (`CostModel`), which is 1 where nothing but arithmetic grows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.groups import tool_trace
from benchmarks.support.training import LR, make_model
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.batch import CostModel
from mcore_mas.megatron.spec import TrainerSpec, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.runtime.local_ray import KEEP_PAGES
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Sampling

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "growth.png"
VOCAB, HIDDEN, LAYERS, MICROBATCH, REPLY, REPEATS = 2048, 128, 2, 4096, 16, 2
PLAIN = {"agents": 1, "turns": 4, "group": 8, "prompt": 128, "policies": 1}
AXES: Mapping[str, Sequence[int]] = {
    "agents": (1, 2, 4, 8),
    "turns": (1, 4, 16, 32, 64),
    "group": (4, 8, 16, 32, 64),
    "prompt": (128, 512, 2048, 4096, 8192),
    "policies": (1, 2, 4),
}


def turns_of(point: Mapping[str, int]) -> list[Sample]:
    """Of one policy: the turns of each agent's group of chats."""
    found: list[Sample] = []
    for agent in range(point["agents"]):
        trace = tool_trace(
            VOCAB,
            turns=point["turns"],
            samples=point["group"],
            task=point["prompt"],
            sampled=REPLY,
            observed=16,
        )
        for sample in trace:  # each agent has a system prompt of its own
            name, prompt = f"agent{agent}", (agent, *sample.prompt_ids[1:])
            found.append(
                replace(
                    sample, agent=name, trajectory=f"{agent}.{sample.trajectory}", prompt_ids=prompt
                )
            )
    return found


def measure(axis: str) -> None:
    """Print a row for each point of an axis."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        init_process_groups(rank=0, threads=1)
        spec = TrainerSpec(model=folder, lr=LR, objective=Objective())
        cost = CostModel.of(spec)
        most = max(AXES[axis]) if axis == "policies" else 1
        trainers = [MegatronTrainer(spec) for _ in range(most)]
        length = PLAIN["prompt"] + 32 * PLAIN["turns"] + 64
        length += (max(AXES["prompt"]) if axis == "prompt" else 0) + (
            32 * 64 if axis == "turns" else 0
        )
        engines = [
            EmbeddedEngine.from_folder(folder, max_length=length, rows=64) for _ in range(most)
        ]
        for size in AXES[axis]:
            point = PLAIN | {axis: size}
            samples = turns_of(point)
            last = [sample for sample in samples if sample.turn == point["turns"] - 1]
            room = max(MICROBATCH, 2 * point["prompt"])
            best: dict[str, float] = {}
            for _ in range(REPEATS):
                row = {"sample": 0.0, "pack": 0.0, "update": 0.0}
                for trainer, engine in zip(trainers[: point["policies"]], engines, strict=False):
                    marks = [time.process_time()]
                    for number, chat in enumerate(last):
                        engine.submit(
                            number, chat.prompt_ids, Sampling(max_tokens=REPLY, seed=number)
                        )
                    while engine.has_work:
                        engine.step()
                    marks.append(time.process_time())
                    batches = pack(samples, room)
                    marks.append(time.process_time())
                    trainer.update(batches)
                    marks.append(time.process_time())
                    engine.reset()
                    row = {
                        name: row[name] + b - a
                        for name, a, b in zip(row, marks, marks[1:], strict=False)
                    }
                best = {name: min(value, best.get(name, value)) for name, value in row.items()}
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
            tokens = point["policies"] * sum(len(batch.token_ids) for batch in pack(samples, room))
            # sampling is one forward pass over what is packed of the last turns, an update three
            flops = sum(cost.work_of(b) for b in pack(last, sys.maxsize))
            flops += 3 * sum(cost.work_of(b) for b in pack(samples, room))
            row = {
                "axis": axis,
                "size": size,
                "tokens": tokens,
                "gflop": point["policies"] * flops / 1e9,
            }
            print(json.dumps({**row, **best, "peak_mb": peak}), flush=True)


def exponents(rows: Sequence[Mapping[str, Any]], over: str = "size") -> dict[str, float]:
    """By axis, the slope of log CPU seconds over the log of a column, of the upper half of its points."""
    found = {}
    for axis in AXES:
        own = [row for row in rows if row["axis"] == axis]
        own = own[(len(own) - 1) // 2 :]
        if len(own) > 1:
            seconds = [row["sample"] + row["pack"] + row["update"] for row in own]
            found[axis] = float(
                np.polyfit(np.log([row[over] for row in own]), np.log(seconds), 1)[0]
            )
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Two panels: CPU seconds and memory over the sizes, as multiples of each axis' first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    slopes = exponents(rows)
    for axis in slopes:
        own = [row for row in rows if row["axis"] == axis]
        sizes = [row["size"] / own[0]["size"] for row in own]
        seconds = [row["sample"] + row["pack"] + row["update"] for row in own]
        panels[0].plot(
            sizes,
            [s / seconds[0] for s in seconds],
            "o-",
            label=f"{axis}, exponent {slopes[axis]:.2f}",
        )
        panels[1].plot(sizes, [row["peak_mb"] for row in own], "o-", label=axis)
    panels[0].plot([1, 64], [1, 64], "k:", label="linear")
    panels[0].set(
        xscale="log",
        yscale="log",
        xlabel="size, of the first",
        ylabel="CPU time, of the first",
        title="step",
    )
    panels[1].set(
        xscale="log",
        xlabel="size, of the first",
        ylabel="MB of one process, at most",
        title="memory",
    )
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--measure", choices=AXES, help="only this axis, in this process")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    kept = options.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for axis in options.axes:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", axis]
        done = subprocess.run(
            command, env=os.environ | KEEP_PAGES, stdout=subprocess.PIPE, text=True, check=True
        )
        rows = [row for row in rows if row["axis"] != axis]
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        print(
            ", ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
        )
    draw(rows, options.out)
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    slopes = exponents(rows)
    over = exponents(rows, "gflop")
    print(
        ", ".join(
            f"{axis}: size^{slope:.2f}, operations^{over[axis]:.2f}"
            for axis, slope in slopes.items()
        )
    )
    print(
        f"name=growth ratio={max(over.values()):.2f} at_most=1.00 reference=exponent_over_operations n={REPEATS}"
    )


if __name__ == "__main__":
    main()
