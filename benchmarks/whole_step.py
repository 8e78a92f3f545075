"""Wall-clock time of a whole GRPO step: this project's training against TRL's `GRPOTrainer` on one model.

A step: 8 replies to each of 8 prompts of the same lengths, their rewards, and an update; in float32, or in bfloat16
with float32 master weights, which is TRL's default. Three trainings take turns of three steps each: TRL's in both
precisions and this project's in one, then in the other. The least of each phase is shown. A side counts in the
precision in which it is faster, and the last line has the smaller ratio of two shapes. TRL lies in an environment of
its own (requirements/bench.txt) that is made on first use and sees this one's torch.

TRL's one process has as many threads as there are cores. This project's processes have one each, and there is a
data-parallel rank and a replica of the engine for each core, which wait for each other once a step and not at every
operation; `--ranks 1` gives one rank and one replica all threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

import mcore_mas as mm
from mcore_mas.config.cold_start import BaseModelConfig
from mcore_mas.pipeline.base_model import init_model, train_tokenizer
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Message, Task, Trajectory
from rollout.teams.team import TeamSession

ROOT = Path(__file__).resolve().parents[1]
TASKS, GROUP, LR, WARM, GOAL, STEPS = 8, 8, 1e-5, 1, 5.0, 1000
TURN = 3  # steps in a row, as a training takes them: memory is warm, and what is done every so often is done as often
PRECISIONS = ("float32", "bfloat16")
ENVIRONMENT = dict(os.environ)  # of TRL: that of a run's own processes changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and how many tokens prompts and replies have."""

    base: BaseModelConfig
    prompt: int
    reply: int


SHAPES = {
    "1.5M": Shape(
        base=BaseModelConfig(layers=4, hidden=128, heads=4, kv_heads=2, ffn=512, vocab=4096),
        prompt=128,
        reply=64,
    ),
    "7M": Shape(
        base=BaseModelConfig(layers=6, hidden=256, heads=4, kv_heads=2, ffn=1024, vocab=4096),
        prompt=256,
        reply=128,
    ),
}


def make_model(folder: Path, shape: Shape) -> list[str]:
    """A random model in `folder`, and prompts that render to exactly as many tokens as the shape has."""
    draw = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=3)) for _ in range(3600)]
    tokenizer = train_tokenizer(iter([f" {word}" for word in words] * 4), shape.base.vocab, "words")
    tokenizer.save_pretrained(str(folder))
    init_model(tokenizer, shape.base, 0).save_pretrained(str(folder))
    renderer = Renderer(folder)
    whole = [word for word in dict.fromkeys(words) if len(renderer.encode(f" {word}")) == 1]
    texts = []
    for _ in range(4 * TASKS):
        chosen = draw.choices(whole, k=shape.prompt)
        over = len(renderer.render([Message(role="user", content=" ".join(chosen))])) - shape.prompt
        texts.append(" ".join(chosen[:-over]))
    assert {len(renderer.render([Message(role="user", content=text)])) for text in texts} == {
        shape.prompt
    }
    return texts


async def answer(task: Task, team: TeamSession, env: Env) -> None:
    """One reply."""
    await env.step(str(await team.act("writer", problem=env.reset(task))))


def odd(trajectory: Trajectory) -> float:
    """As TRL is given it: 1 for a reply whose token ids have an odd sum."""
    return float(sum(trajectory.turns[0].completion_ids) % 2)


def ours(
    folder: Path, shape: Shape, texts: list[str], threads: int, ranks: int, bf16: bool
) -> Generator[dict[str, float], None, None]:
    """A step for each `next`."""
    share = (
        TASKS // ranks * (shape.prompt + GROUP * shape.reply)
    )  # tokens of a rank, prompts counted once
    tasks = {
        "train": [(text, "") for text in texts],
        "validation": [(texts[0], "")],
        "test": [(texts[0], "")],
    }
    run = mm.Run(
        [mm.AgentSpec("writer", user="{problem}", settings={"max_tokens": shape.reply})],
        answer,
        tasks=tasks,
        policies={"shared": {"model": str(folder / "model"), "bf16": bf16}},
        reward=odd,
        folder=folder / f"run-{PRECISIONS[bf16]}",
        advantage="grpo",
        steps=STEPS,
        lr=LR,
        validate_every=STEPS,
        checkpoint_every=STEPS,
        microbatch_tokens=share,
        dp=ranks,
        engine={"max_length": shape.prompt + shape.reply, "replicas": ranks},
        cluster={"threads_per_process": max(1, threads // ranks)},
    )
    rows = iter(run)
    while True:
        cpu, wall = (
            spent(),
            time.perf_counter(),
        )  # a look at all processes is none of the step's work
        row = next(rows)
        step = time.perf_counter() - wall
        assert row["policy/shared/grad_norm"] > 0
        update, hand_over = row["time/update_s"], row["policy/shared/hand_over_s"]
        yield {
            "step": step,
            "cpu": spent() - cpu,
            "collect": row["time/collect_s"],
            "update": update - hand_over,
            "hand-over": hand_over,
            "rest": step - row["time/collect_s"] - update,
            "tokens": row["rollout/tokens"],
        }


def spent() -> float:
    """CPU seconds of this process and of all that it started, but for TRL's."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            if "trl_steps.py" not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def theirs(
    python: Path, folder: Path, shape: Shape, texts: list[str], threads: int, parts: int, bf16: bool
) -> Generator[dict[str, float], None, None]:
    """A step of TRL's for each `next`, in a process of its own that waits in between."""
    renderer = Renderer(folder / "model")
    rendered = [renderer.render([Message(role="user", content=text)]) for text in texts]
    job = {
        "model": str(folder / "model"),
        "out": str(folder / f"trl-{PRECISIONS[bf16]}"),
        "prompts": [renderer.decode_raw(ids) for ids in rendered],
        "ids": list(rendered[0]),
        "reply": shape.reply,
        "tasks": TASKS,
        "group": GROUP,
        "lr": LR,
        "threads": threads,
        "parts": parts,
        "bf16": bf16,
    }
    command = [
        str(python),
        "-W",
        "ignore",
        str(ROOT / "benchmarks" / "support" / "trl_steps.py"),
        json.dumps(job),
    ]
    settings = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("ready"):
                child.stdin.write("step\n")
                child.stdin.flush()
            elif line.startswith("row "):
                row = json.loads(line[4:])
                yield {**row, "update": row["step"] - row["collect"], "hand-over": 0.0, "rest": 0.0}
    finally:
        child.kill()
        child.wait()


def environment(folder: Path) -> Path:
    """The Python of TRL's environment, made if it is not there: what it lacks it takes from this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
        inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(inside, "this_environment.pth").write_text(sysconfig.get_path("purelib"))
        wanted = ROOT / "requirements" / "bench.txt"
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(wanted)], check=True)
    return python


def compare(name: str, python: Path, repeats: int, threads: int, parts: int, ranks: int) -> float:
    """TRL's seconds over ours for a shape, by the least of each while they took turns."""
    shape, ratios = SHAPES[name], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = make_model(folder / "model", shape)
        trl = {
            f"TRL, {precision}": theirs(python, folder, shape, texts, threads, parts, bool(bf16))
            for bf16, precision in enumerate(PRECISIONS)
        }
        for bf16, precision in enumerate(PRECISIONS):
            mine = ours(folder, shape, texts, threads, ranks, bool(bf16))
            sides = {**trl, f"ours, {precision}": mine}
            *others, own = least(sides, repeats)
            mine.close()
            for side, row in zip(sides, (*others, own), strict=True):
                print(
                    f"{name}, {side}: a step {row['step']:.2f} s ({row['cpu']:.2f} CPU s): "
                    f"collect {row['collect']:.2f}, update {row['update']:.2f}, "
                    f"hand-over {row['hand-over']:.3f}, rest {row['rest']:.3f}"
                )
            faster = min(others, key=lambda row: row["step"])
            ratios.append(faster["step"] / own["step"])
            print(
                f"  {ratios[-1]:.2f} times as fast as the faster of TRL's, in {precision} TRL's is "
                f"{others[bf16]['step'] / own['step']:.2f}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        for training in trl.values():
            training.close()
    return max(ratios)


def least(sides: Mapping[str, Iterator[dict[str, float]]], repeats: int) -> list[dict[str, float]]:
    """The least of each phase of some trainings' steps, while they take turns `repeats` times, after one to warm up."""
    best: list[dict[str, float]] = [{} for _ in sides]
    for turn in range(WARM + repeats):
        for number, side in enumerate(sides):
            for row in itertools.islice(sides[side], TURN):
                print(
                    f"  {side} {turn}: {', '.join(f'{key} {value:.2f}' for key, value in row.items())}",
                    flush=True,
                )
                if turn >= WARM:
                    best[number] = {
                        key: min(value, best[number].get(key, value)) for key, value in row.items()
                    }
    return best


def main() -> None:
    """Compare, shape by shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process"
    )
    parser.add_argument(
        "--ranks", type=int, default=len(os.sched_getaffinity(0)), help="of ours, and replicas"
    )
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--parts", type=int, default=8, help="passes that TRL cuts an update into; 8 take the least"
    )
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-trl")
    options = parser.parse_args()
    python = environment(options.environment)
    how = options.repeats, options.threads, options.parts, options.ranks
    ratios = [compare(name, python, *how) for name in options.shapes]
    print(
        f"name=whole_step ratio={min(ratios):.2f} goal={GOAL:.2f} reference=trl_grpo n={options.repeats}"
    )


if __name__ == "__main__":
    main()
