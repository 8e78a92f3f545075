"""CPU time and memory of a training step as agents, turns, group size, prompt length and policies grow.

A step samples the last reply of every chat, packs all turns, and updates on them. A micro-batch has
room for a group: 4096 tokens, or twice the prompt. Each axis is measured in a separate process, with
its points in rising order.

The exponent of an axis is the slope of log CPU time over log size, over the upper half of its points.
It exceeds 1 with the length of sequences, because the operations of attention grow with the square of
the length. The result is the largest slope over the floating-point operations of the step
(`CostModel`), which is 1 if only arithmetic grows.
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

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import tool_trace
from benchmarks.support.process import memory_bytes
from benchmarks.support.result import print_result
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
VOCAB = 2048
HIDDEN = 128
LAYERS = 2
MICROBATCH_TOKENS = 4096
REPLY_TOKENS = 16
RESULT_TOKENS = 16
ENGINE_ROWS = 64
REPEATS = 2
# Size of each axis while another one grows.
DEFAULTS = {"agents": 1, "turns": 4, "group": 8, "prompt": 128, "policies": 1}
AXES: Mapping[str, Sequence[int]] = {
    "agents": (1, 2, 4, 8),
    "turns": (1, 4, 16, 32, 64),
    "group": (4, 8, 16, 32, 64),
    "prompt": (128, 512, 2048, 4096, 8192),
    "policies": (1, 2, 4),
}


def make_samples(sizes: Mapping[str, int]) -> list[Sample]:
    """Return the turns of one policy: a group of chats for each agent."""
    result: list[Sample] = []
    for agent in range(sizes["agents"]):
        trace = tool_trace(
            VOCAB,
            turns=sizes["turns"],
            chats=sizes["group"],
            task_tokens=sizes["prompt"],
            reply_tokens=REPLY_TOKENS,
            result_tokens=RESULT_TOKENS,
        )
        for sample in trace:
            # The first token differs, as if each agent had its own system prompt.
            result.append(
                replace(
                    sample,
                    agent=f"agent{agent}",
                    trajectory=f"{agent}.{sample.trajectory}",
                    prompt_ids=(agent, *sample.prompt_ids[1:]),
                )
            )
    return result


def run_step(
    trainer: MegatronTrainer,
    engine: EmbeddedEngine,
    samples: Sequence[Sample],
    last_turns: Sequence[Sample],
    microbatch_tokens: int,
) -> dict[str, float]:
    """Take one step; return the CPU seconds of sampling, packing and the update."""
    began = time.process_time()
    for number, sample in enumerate(last_turns):
        sampling = Sampling(max_tokens=REPLY_TOKENS, seed=number)
        engine.submit(number, sample.prompt_ids, sampling)
    while engine.has_work:
        engine.step()
    sampled = time.process_time()
    batches = pack(samples, microbatch_tokens)
    packed = time.process_time()
    trainer.update(batches)
    updated = time.process_time()
    engine.reset()
    return {"sample": sampled - began, "pack": packed - sampled, "update": updated - packed}


def measure(axis: str) -> None:
    """Print a JSON row for each point of an axis."""
    torch.set_num_threads(1)
    max_policies = max(AXES[axis]) if axis == "policies" else 1
    turn_tokens = REPLY_TOKENS + RESULT_TOKENS
    max_length = DEFAULTS["prompt"] + turn_tokens * DEFAULTS["turns"] + 64
    if axis == "prompt":
        max_length += max(AXES["prompt"])
    if axis == "turns":
        max_length += turn_tokens * max(AXES["turns"])

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        init_process_groups(rank=0, threads=1)
        spec = TrainerSpec(model=folder, lr=LR, objective=Objective())
        trainers = [MegatronTrainer(spec) for _ in range(max_policies)]
        engines = [
            EmbeddedEngine.from_folder(folder, max_length=max_length, rows=ENGINE_ROWS)
            for _ in range(max_policies)
        ]
        cost = CostModel.of(spec)
        for size in AXES[axis]:
            sizes = DEFAULTS | {axis: size}
            policies = sizes["policies"]
            samples = make_samples(sizes)
            last_turns = [sample for sample in samples if sample.turn == sizes["turns"] - 1]
            microbatch_tokens = max(MICROBATCH_TOKENS, 2 * sizes["prompt"])
            best = dict.fromkeys(("sample", "pack", "update"), float("inf"))
            for _ in range(REPEATS):
                totals = dict.fromkeys(best, 0.0)
                for trainer, engine in zip(trainers[:policies], engines, strict=False):
                    step = run_step(trainer, engine, samples, last_turns, microbatch_tokens)
                    totals = {part: totals[part] + seconds for part, seconds in step.items()}
                best = {part: min(best[part], seconds) for part, seconds in totals.items()}

            batches = pack(samples, microbatch_tokens)
            # Sampling is one forward pass over the packed last turns; an update counts as three
            # passes.
            flops = sum(cost.batch_work(batch) for batch in pack(last_turns, sys.maxsize))
            flops += 3 * sum(cost.batch_work(batch) for batch in batches)
            row = {
                "axis": axis,
                "size": size,
                "tokens": policies * sum(len(batch.token_ids) for batch in batches),
                "gflop": policies * flops / 1e9,
                **best,
                "peak_mb": memory_bytes() / 2**20,
            }
            print(json.dumps(row), flush=True)


def step_seconds(row: Mapping[str, Any]) -> float:
    """Return the CPU seconds of a step."""
    return row["sample"] + row["pack"] + row["update"]


def exponents(rows: Sequence[Mapping[str, Any]], column: str = "size") -> dict[str, float]:
    """Return the slope of log CPU time over the log of a column, over the upper half of the points, by axis."""
    slopes = {}
    for axis in AXES:
        points = [row for row in rows if row["axis"] == axis]
        upper = points[(len(points) - 1) // 2 :]
        if len(upper) > 1:
            x = np.log([row[column] for row in upper])
            y = np.log([step_seconds(row) for row in upper])
            slopes[axis] = float(np.polyfit(x, y, 1)[0])
    return slopes


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw CPU time and peak memory over the size; size and time relative to each axis's first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, slope in exponents(rows).items():
        points = [row for row in rows if row["axis"] == axis]
        first = points[0]
        sizes = [row["size"] / first["size"] for row in points]
        relative_times = [step_seconds(row) / step_seconds(first) for row in points]
        times.plot(sizes, relative_times, "o-", label=f"{axis}, exponent {slope:.2f}")
        memory.plot(sizes, [row["peak_mb"] for row in points], "o-", label=axis)

    times.plot([1, 64], [1, 64], "k:", label="linear")
    times.set(xscale="log", yscale="log", xlabel="size, relative to the first point")
    times.set(ylabel="CPU time, relative to the first point", title="step")
    memory.set(xscale="log", xlabel="size, relative to the first point")
    memory.set(ylabel="peak memory of the process, MB", title="memory")
    for axes in (times, memory):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def measure_in_new_process(axis: str) -> list[dict[str, Any]]:
    """Run `measure` in a process that keeps freed memory, as a run does; return its rows."""
    command = [sys.executable, "-W", "ignore", __file__, "--measure", axis]
    environment = os.environ | KEEP_PAGES
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def format_row(row: Mapping[str, Any]) -> str:
    cells = [
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    ]
    return ", ".join(cells)


def main() -> None:
    """Measure axes, and draw them with earlier measurements of other axes, which lie next to the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--measure", choices=AXES, help="only this axis, in this process")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return

    rows_file = options.out.with_suffix(".jsonl")
    rows = []
    if rows_file.exists():
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    for axis in options.axes:
        new_rows = measure_in_new_process(axis)
        rows = [*(row for row in rows if row["axis"] != axis), *new_rows]
    for row in rows:
        print(format_row(row))
    draw(rows, options.out)
    rows_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    by_size = exponents(rows)
    by_operations = exponents(rows, "gflop")
    shown = [
        f"{axis}: size^{by_size[axis]:.2f}, operations^{by_operations[axis]:.2f}"
        for axis in by_size
    ]
    print(", ".join(shown))
    print_result(
        "growth",
        max(by_operations.values()),
        goal=1.0,
        at_most=True,
        reference="exponent_over_operations",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
