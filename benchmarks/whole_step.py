"""Wall-clock time of a whole GRPO step: this project's training against TRL's `GRPOTrainer` on the same model.

A step generates 8 replies to each of 8 prompts of equal length, rewards them, and updates, in float32
or in bfloat16 with float32 master weights (TRL's default). For each precision of this project's
training, its steps alternate with those of two trainings of TRL, one in float32 and one in bfloat16,
three steps at a time. The minimum of each phase is shown. Each side is compared in its faster
precision, and the result is the smaller ratio of two shapes. TRL has a separate environment
(requirements/bench.txt), which is created on first use and sees the torch of this environment.

TRL's single process has a thread per core. This project has a data-parallel rank and an engine
replica per core, with one thread each; they wait for each other once per step instead of at every
operation. `--ranks 1` gives one rank and one replica all threads.
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
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mcore_mas as mm
from benchmarks.support.result import print_result
from mcore_mas.config.cold_start import BaseModelConfig
from mcore_mas.pipeline.base_model import init_model, train_tokenizer
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Message, Task, Trajectory
from rollout.teams.team import TeamSession

ROOT = Path(__file__).resolve().parents[1]
TRL_SCRIPT = ROOT / "benchmarks" / "support" / "trl_steps.py"
TASKS = 8
GROUP = 8
LR = 1e-5
WARM_UPS = 1
GOAL = 5.0
MAX_STEPS = 1000
# Steps in a row of one training, so that memory is warm and periodic work happens as often as in a
# real training.
STEPS_PER_TURN = 3
PRECISIONS = ("float32", "bfloat16")
# The environment variables before this project's runs change them.
ORIGINAL_ENVIRONMENT = dict(os.environ)

Row = dict[str, float]  # seconds of the phases of a step, by name
Training = Generator[Row, None, None]  # yields a row after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and the number of tokens of prompts and replies."""

    model: BaseModelConfig
    prompt: int
    reply: int


SHAPES = {
    "1.5M": Shape(
        model=BaseModelConfig(layers=4, hidden=128, heads=4, kv_heads=2, ffn=512, vocab=4096),
        prompt=128,
        reply=64,
    ),
    "7M": Shape(
        model=BaseModelConfig(layers=6, hidden=256, heads=4, kv_heads=2, ffn=1024, vocab=4096),
        prompt=256,
        reply=128,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        repeats: turns of each training that are measured.
        threads: number of threads of TRL's process, and of all processes of this project.
        ranks: data-parallel ranks, and engine replicas, of this project.
        parts: micro-batches of an update by TRL.
    """

    repeats: int
    threads: int
    ranks: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model in a temporary folder, and prompts for it."""

    folder: Path
    shape: Shape
    prompts: list[str]

    @property
    def model(self) -> Path:
        """Folder of the model."""
        return self.folder / "model"


def prompt_ids(renderer: Renderer, text: str) -> tuple[int, ...]:
    """Return the token ids of a prompt in the chat template."""
    return renderer.render([Message(role="user", content=text)])


def make_workload(folder: Path, shape: Shape) -> Workload:
    """Write a random model, and draw prompts with exactly the shape's number of tokens."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=3)) for _ in range(3600)]
    corpus = [f" {word}" for word in words] * 4
    tokenizer = train_tokenizer(iter(corpus), shape.model.vocab, "words")
    tokenizer.save_pretrained(str(folder / "model"))
    init_model(tokenizer, shape.model, 0).save_pretrained(str(folder / "model"))

    renderer = Renderer(folder / "model")
    single_token_words = [
        word for word in dict.fromkeys(words) if len(renderer.encode(f" {word}")) == 1
    ]
    prompts = []
    for _ in range(4 * TASKS):
        chosen = draw.choices(single_token_words, k=shape.prompt)
        # The chat template adds tokens; drop as many words.
        excess = len(prompt_ids(renderer, " ".join(chosen))) - shape.prompt
        prompts.append(" ".join(chosen[:-excess]))
    assert all(len(prompt_ids(renderer, prompt)) == shape.prompt for prompt in prompts)
    return Workload(folder=folder, shape=shape, prompts=prompts)


async def answer_once(task: Task, team: TeamSession, env: Env) -> None:
    """Let the agent reply once."""
    reply = await team.act("writer", problem=env.reset(task))
    await env.step(str(reply))


def reward_odd_sum(trajectory: Trajectory) -> float:
    """Return 1 for a reply whose token ids have an odd sum, else 0, as in `trl_steps.py`."""
    return float(sum(trajectory.turns[0].completion_ids) % 2)


def train_here(workload: Workload, options: Options, *, bf16: bool) -> Training:
    """Take a step of this project's training for each `next`."""
    shape = workload.shape
    prompts = workload.prompts
    answer = "0"  # the environment needs one; the reward does not use its outcome
    precision = "bfloat16" if bf16 else "float32"
    # Tokens of a rank's share of a step; a prompt is stored once for its group.
    rank_tokens = TASKS // options.ranks * (shape.prompt + GROUP * shape.reply)
    run = mm.Run(
        [mm.AgentSpec("writer", user="{problem}", settings={"max_tokens": shape.reply})],
        answer_once,
        tasks={
            "train": [(prompt, answer) for prompt in prompts],
            "validation": [(prompts[0], answer)],
            "test": [(prompts[0], answer)],
        },
        policies={"shared": {"model": str(workload.model), "bf16": bf16}},
        reward=reward_odd_sum,
        folder=workload.folder / f"run-{precision}",
        advantage="grpo",
        steps=MAX_STEPS,
        lr=LR,
        validate_every=MAX_STEPS,
        checkpoint_every=MAX_STEPS,
        microbatch_tokens=rank_tokens,
        dp=options.ranks,
        engine={"max_length": shape.prompt + shape.reply, "replicas": options.ranks},
        cluster={"threads_per_process": max(1, options.threads // options.ranks)},
    )
    steps = iter(run)
    while True:
        cpu_before = cpu_seconds_here()  # not part of the step's time
        began = time.perf_counter()
        metrics = next(steps)
        seconds = time.perf_counter() - began
        assert metrics["policy/shared/grad_norm"] > 0
        collect_s = metrics["time/collect_s"]
        update_s = metrics["time/update_s"]
        sync_s = metrics["policy/shared/hand_over_s"]
        yield {
            "step": seconds,
            "cpu": cpu_seconds_here() - cpu_before,
            "collect": collect_s,
            "update": update_s - sync_s,
            "hand-over": sync_s,
            "rest": seconds - collect_s - update_s,
            "tokens": metrics["rollout/tokens"],
        }


def cpu_seconds_here() -> float:
    """Return the CPU seconds of this process and its descendants, without those of TRL."""
    this_process = psutil.Process()
    total = 0.0
    for process in [this_process, *this_process.children(recursive=True)]:
        try:
            if TRL_SCRIPT.name not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def train_with_trl(python: Path, workload: Workload, options: Options, *, bf16: bool) -> Training:
    """Take a step of TRL's training for each `next`, in a process that waits in between."""
    renderer = Renderer(workload.model)
    ids = [prompt_ids(renderer, prompt) for prompt in workload.prompts]
    precision = "bfloat16" if bf16 else "float32"
    job = {
        "model": str(workload.model),
        "out": str(workload.folder / f"trl-{precision}"),
        "prompts": [renderer.decode_raw(row) for row in ids],
        "ids": list(ids[0]),
        "reply": workload.shape.reply,
        "tasks": TASKS,
        "group": GROUP,
        "lr": LR,
        "threads": options.threads,
        "parts": options.parts,
        "bf16": bf16,
    }
    command = [str(python), "-W", "ignore", str(TRL_SCRIPT), json.dumps(job)]
    variables = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        command,
        env=ORIGINAL_ENVIRONMENT | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("ready"):
                child.stdin.write("step\n")
                child.stdin.flush()
            elif line.startswith("row "):
                row = json.loads(line.removeprefix("row "))
                update_s = row["step"] - row["collect"]
                yield {**row, "update": update_s, "hand-over": 0.0, "rest": 0.0}
    finally:
        child.kill()
        child.wait()


def make_trl_environment(folder: Path) -> Path:
    """Return the Python of TRL's environment; create it on first use, on top of this environment's packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
        variables = {"base": str(folder), "platbase": str(folder)}
        site_packages = sysconfig.get_path("purelib", vars=variables)
        Path(site_packages, "this_environment.pth").write_text(sysconfig.get_path("purelib"))
        requirements = ROOT / "requirements" / "bench.txt"
        install = [str(python), "-m", "pip", "install", "-q", "-r", str(requirements)]
        subprocess.run(install, check=True)
    return python


def compare(name: str, python: Path, options: Options) -> float:
    """Return the time of TRL's step divided by ours for a shape, each in its faster precision."""
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        workload = make_workload(Path(temporary), SHAPES[name])
        trl_trainings = {
            precision: train_with_trl(python, workload, options, bf16=precision == "bfloat16")
            for precision in PRECISIONS
        }
        for precision in PRECISIONS:
            our_training = train_here(workload, options, bf16=precision == "bfloat16")
            trainings = {f"TRL, {key}": training for key, training in trl_trainings.items()}
            trainings[f"ours, {precision}"] = our_training
            best = measure_best_steps(trainings, options.repeats)
            our_training.close()
            for label, row in best.items():
                print(
                    f"{name}, {label}: a step {row['step']:.2f} s ({row['cpu']:.2f} CPU s): "
                    f"collect {row['collect']:.2f}, update {row['update']:.2f}, "
                    f"hand-over {row['hand-over']:.3f}, rest {row['rest']:.3f}"
                )
            our_s = best[f"ours, {precision}"]["step"]
            same_precision_s = best[f"TRL, {precision}"]["step"]
            fastest_trl_s = min(best[f"TRL, {key}"]["step"] for key in PRECISIONS)
            ratios.append(fastest_trl_s / our_s)
            print(
                f"  {ratios[-1]:.2f} times as fast as TRL's faster precision, "
                f"{same_precision_s / our_s:.2f} times as fast as TRL in {precision}; "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        for training in trl_trainings.values():
            training.close()
    return max(ratios)


def measure_best_steps(trainings: Mapping[str, Training], repeats: int) -> dict[str, Row]:
    """Let the trainings take turns; return the minimum of each phase by training, without the warm-up."""
    best: dict[str, Row] = {label: {} for label in trainings}
    for turn in range(WARM_UPS + repeats):
        for label, training in trainings.items():
            for row in itertools.islice(training, STEPS_PER_TURN):
                shown = ", ".join(f"{phase} {value:.2f}" for phase, value in row.items())
                print(f"  {label} {turn}: {shown}", flush=True)
                if turn < WARM_UPS:
                    continue
                for phase, value in row.items():
                    best[label][phase] = min(value, best[label].get(phase, value))
    return best


def main() -> None:
    """Compare all shapes; the result is the smaller ratio."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cores, help="of each side")
    parser.add_argument("--ranks", type=int, default=cores, help="of ours, and replicas")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--parts", type=int, default=8, help="micro-batches of TRL's update; 8 is the fastest"
    )
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-trl")
    arguments = parser.parse_args()
    options = Options(
        repeats=arguments.repeats,
        threads=arguments.threads,
        ranks=arguments.ranks,
        parts=arguments.parts,
    )
    python = make_trl_environment(arguments.environment)
    ratios = [compare(name, python, options) for name in arguments.shapes]
    print_result(
        "whole_step", min(ratios), goal=GOAL, reference="trl_grpo", repeats=options.repeats
    )


if __name__ == "__main__":
    main()
