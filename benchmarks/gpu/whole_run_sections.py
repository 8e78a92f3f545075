"""The sections of `benchmarks.gpu.whole_run`; each prints its figures as lines of JSON.

python -m benchmarks.gpu.whole_run_sections NAME --kit DIR --work DIR --device cuda|cpu [--small]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
import yaml

from benchmarks.gpu import generation, sections
from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer, synchronize, time_call
from benchmarks.gpu.shapes import MODELS, operations
from mcore_mas.config.run import RunConfig
from mcore_mas.equations.statistics import mean_interval
from mcore_mas.planning.estimate import estimate_peak_memory, load_architectures
from mcore_mas.planning.gpus import GPUS
from rollout.base.json_files import read_json_lines

KIT_ROOT = "@KIT@"  # stands in a packed config for the folder that holds the run's files
STEP_METRICS = ("reward/mean", "rollout/tokens", "time/collect_s", "time/update_s", "time/mfu")
AGENTS = ("solver", "verifier")
RANK_PROCESS = "ray::TrainerRank"  # title that Ray gives the processes of a trainer's ranks
POLL_S = 0.5
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system of its own, which Ray fills


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a section."""

    kit: Path
    work: Path
    device: str
    small: bool


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.whole_run_sections")
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--small", action="store_true")
    values = vars(parser.parse_args())
    section = SECTIONS[values.pop("section")]
    options = Options(**values)
    if options.device == "cuda" and not torch.cuda.is_available():
        say(skipped="no GPU here; --device cpu --small runs the same sections without one")
        return
    section(options)


def start(options: Options) -> None:
    """Print the machine's figures, and run a task on the device in a local Ray."""
    import ray

    sections.probe(options.small)
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    say(what=f"{SHARED_MEMORY}, GiB free", value=round(free_bytes / 2**30, 1))

    began = time.perf_counter()
    gpus = 1 if options.device == "cuda" else 0
    ray.init(
        address="local",  # else a Ray that runs on this machine would be joined
        num_cpus=2,
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=256 << 20,
    )
    sees_gpu = ray.remote(num_gpus=gpus)(torch.cuda.is_available)
    visible = ray.get(sees_gpu.remote(), timeout=30)
    say(
        what="Ray and a task on the device",
        seconds=round(time.perf_counter() - began, 1),
        ok=visible == (options.device == "cuda"),
    )
    ray.shutdown()


def train(options: Options) -> None:
    """Train the demo's two policies in float32; trainers and engines share the device in turn."""
    steps = 2 if options.small else 40
    run = write_run(options, "float32", {"trainer.steps": steps})
    train_run(run)


def evaluate(options: Options) -> None:
    """Evaluate the float32 run's base and trained team; print the gain with its interval."""
    run = options.work / "runs" / "float32"
    scores = {}
    for state in ("base", "trained"):
        began = time.perf_counter()
        run_command("evaluate", str(run / "config.yaml"), "--state", state)
        evaluation = json.loads((run / "evaluation" / f"{state}.json").read_text())
        metric = f"avg@{evaluation['k']}"
        scores[state] = {task["task_id"]: task["metrics"][metric] for task in evaluation["tasks"]}
        say(
            what=f"{metric}, {state}",
            value=round(100 * fmean(scores[state].values()), 1),
            tasks=len(scores[state]),
            seconds=round(time.perf_counter() - began, 1),
        )
    gains = [100 * (scores["trained"][task] - score) for task, score in scores["base"].items()]
    low, high = mean_interval(gains, "gain")
    say(what="gain, points", value=round(fmean(gains), 1), low=round(low, 1), high=round(high, 1))


def idle(options: Options) -> None:
    """Print how long no kernel runs during an update, and the ten longest gaps between kernels."""
    cases = [("1.7b", "groups"), ("1.7b", "turns"), ("0.5b", "groups")]
    if options.small:
        cases = [("tiny", "small")]
    for model, layout in cases:
        for microbatches in (1, 2 if options.small else 8):
            with tempfile.TemporaryDirectory() as folder:
                _profile_update(Path(folder), model, layout, microbatches)
            stop_trainer()


def _profile_update(folder: Path, model: str, layout: str, microbatches: int) -> None:
    """Time an update, then record it with torch's profiler."""
    bf16 = device().type == "cuda"
    trainer, batches = start_trainer(folder, model, layout, count=microbatches, bf16=bf16)
    trainer.update(batches)
    update_s = min(time_call(partial(trainer.update, batches)) for _ in range(2))
    flops = sum(operations(folder / model, batch) for batch in batches)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if bf16:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        trainer.update(batches)
        synchronize()
    kernels = kernel_spans(profile.events())
    gaps = idle_gaps(kernels)
    busy_us = sum(end - start for start, end, _ in merged(kernels))
    case = {"model": model, "layout": layout, "microbatches": microbatches}
    say(
        **case,
        seconds_per_update=round(update_s, 4),
        mfu=round(flops / update_s / sections.PEAK_FLOPS, 5),
        busy_ms=round(busy_us / 1e3, 2),
        idle_ms=round(sum(gap.microseconds for gap in gaps) / 1e3, 2),
        launches=len(kernels),
    )
    for gap in sorted(gaps, key=lambda gap: -gap.microseconds)[:10]:
        say(
            **case,
            gap_us=round(gap.microseconds, 1),
            after=gap.after[:80],
            before=gap.before[:80],
        )


Span = tuple[float, float, str]  # start and end in microseconds, and the name of a kernel


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which no kernel runs, between two kernels."""

    microseconds: float
    after: str  # name of the kernel before the gap
    before: str  # name of the kernel after the gap


def kernel_spans(events: Any) -> list[Span]:
    """Return the spans of a profile's kernels; without a GPU, those of its innermost CPU calls."""
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    chosen = on_gpu or [event for event in events if not event.cpu_children]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in chosen]
    return sorted(spans)


def merged(spans: list[Span]) -> Iterator[Span]:
    """Yield spans with those that overlap joined; the name is that of the last one to end."""
    if not spans:
        return
    start, end, name = spans[0]
    for next_start, next_end, next_name in spans[1:]:
        if next_start > end:
            yield start, end, name
            start, end, name = next_start, next_end, next_name
        elif next_end > end:
            end, name = next_end, next_name
    yield start, end, name


def idle_gaps(spans: list[Span]) -> list[Gap]:
    """Return the gaps between kernels, in order of time."""
    first_names = {start: name for start, _, name in reversed(spans)}
    busy = list(merged(spans))
    return [
        Gap(microseconds=start - end, after=name, before=first_names[start])
        for (_, end, name), (start, _, _) in pairwise(busy)
    ]


def train_bf16(options: Options) -> None:
    """Train the demo's two policies in bfloat16; on a CPU only write the run."""
    steps = 2 if options.small else 15
    run = write_run(options, "bf16", {"trainer.steps": steps, "policies.*.bf16": True})
    if options.device == "cpu":
        say(skipped="a CPU without AVX512-BF16 emulates bfloat16")
        return
    train_run(run)


def killed_rank(options: Options) -> None:
    """Kill a rank in mid-run; check that the weights are those of a run that was not disturbed."""
    steps = 3 if options.small else 8
    changes = {
        "trainer.steps": steps,
        "trainer.tasks_per_step": 4,
        "trainer.checkpoint_every": 1,
        "trainer.validate_every": steps,
        "data.validation": 4,
        "engine.deterministic": True,
    }
    undisturbed = write_run(options, "undisturbed", changes)
    train_run(undisturbed)
    disturbed = write_run(options, "rank_killed", changes)
    kill = KillOnce(at_step=1 if options.small else 4)
    train_run(disturbed, on_step=kill)
    digests = [
        json.loads((run / "train" / "done.json").read_text())["sha256"]
        for run in (undisturbed, disturbed)
    ]
    ok = kill.killed and digests[0] == digests[1]
    say(what="weights after a killed rank", killed=kill.killed, ok=ok)


@dataclass
class KillOnce:
    """Callback after each step of a run, which kills one rank once.

    Attributes:
        at_step: step after which a rank is killed.
        killed: True once a rank was killed.
    """

    at_step: int
    killed: bool = False

    def __call__(self, step: int) -> None:
        """Kill a rank if `at_step` has ended and none was killed yet."""
        if self.killed or step < self.at_step:
            return
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(RANK_PROCESS):
                    process.send_signal(signal.SIGKILL)
                    self.killed = True
                    return


def published_shape(options: Options) -> None:
    """Train a random model of Qwen2.5-0.5B's shape for three steps, in bfloat16 on a GPU."""
    shape = "tiny" if options.small else "0.5b"
    reply_tokens = 16 if options.small else 512
    changes = {
        "cold_start": None,  # the model is drawn below
        # Its replies have the same reward. Estimators that compare replies would train no token; a
        # discount gives the tokens of a reply different returns.
        "advantage.name": "reinforce_pp",
        "advantage.options": {"gamma": 0.99},
        "trainer.steps": 3,
        "trainer.tasks_per_step": 2 if options.small else 32,
        "trainer.group_size": 2 if options.small else 8,
        "trainer.microbatch_tokens": 2048 if options.small else 16_384,
        "trainer.validate_every": 3,
        "data.validation": 2,
        "engine.max_length": 1024,
        "agents.*.max_tokens": reply_tokens,
        "policies.*.bf16": options.device == "cuda",
    }
    run = write_run(options, "published_shape", changes)
    _draw_model(run / "bootstrap" / "model", shape)
    say(run=run.name, planned_peak_mib=planned_peak_mib(run))
    train_run(run)


def planned_peak_mib(run: Path) -> int:
    """Return the planned peak of the memory of the GPU that all processes of a run share."""
    gpu = GPUS["H200"]
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        gpu = replace(gpu, memory=memory_bytes / 1e9)
    config = RunConfig.load(run / "config.yaml")
    peak = estimate_peak_memory(config, load_architectures(config), gpu)
    return round(max(peak.update, peak.rollout) / 2**20)


def _draw_model(folder: Path, shape: str) -> None:
    """Replace a model's weights by random ones of a published shape; its tokenizer stays.

    The vocabulary is not smaller than the tokenizer's, as in published models.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer_size = len(AutoTokenizer.from_pretrained(folder))
    sizes = MODELS[shape] | {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
    sizes["vocab_size"] = max(sizes["vocab_size"], tokenizer_size)
    config = AutoConfig.for_model(**sizes)
    old = AutoConfig.from_pretrained(folder)
    config.update({name: getattr(old, name) for name in ("bos_token_id", "eos_token_id")})
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder)


def engine(options: Options) -> None:
    """Measure the embedded engine by number of rows, and compare it with the trainer."""
    generation.engine(options.small)


def sleep(options: Options) -> None:
    """Offload a trainer and restore it; print the device's memory in use at each point."""
    model, layout = ("tiny", "small") if options.small else ("1.7b", "groups")
    with tempfile.TemporaryDirectory() as folder:
        bf16 = options.device == "cuda"
        trainer, batches = start_trainer(Path(folder), model, layout, bf16=bf16)
        trainer.update(batches)
        awake_mib = memory_in_use_mib()
        sleep_s = time_call(trainer.sleep)
        asleep_mib = memory_in_use_mib()
        wake_s = time_call(trainer.wake)
        trainer.update(batches)
        say(
            model=model,
            awake_mib=awake_mib,
            asleep_mib=asleep_mib,
            sleep_s=round(sleep_s, 2),
            wake_s=round(wake_s, 2),
            ok=awake_mib is None or asleep_mib is None or asleep_mib < awake_mib,
        )
    stop_trainer()


def mixture(options: Options) -> None:
    """Measure whole updates of a mixture of experts."""
    cases = [{"model": "30b-a3b", "layout": "groups", "recompute": "selective"}]
    if options.small:
        cases = [{"model": "tiny-moe", "layout": "small"}]
    sections.measure_updates(cases)


def attention(options: Options) -> None:
    """Measure the attention kernels of five layouts."""
    if options.device == "cpu":
        say(skipped="the attention kernels are measured on a GPU only")
        return
    sections.attention(options.small)


def head(options: Options) -> None:
    """Measure the output layer by the size of a chunk of logits."""
    sections.head(options.small)


def write_run(options: Options, name: str, changes: Mapping[str, Any]) -> Path:
    """Write a run folder from the kit's demo, with some settings changed.

    Args:
        options: options of the section, with the kit and the folder of the runs.
        name: name of the run.
        changes: values by dotted key; `*` stands for every entry of a section.

    Returns:
        Folder of the run, with `config.yaml`, `tasks/` and `bootstrap/`.
    """
    runs = options.work / "runs"
    run = runs / name
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(options.kit / "demo", run)
    text = (run / "config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text.replace(KIT_ROOT, str(runs)))
    packed_name = config["run"]
    config = json.loads(json.dumps(config).replace(f"{runs}/{packed_name}/", f"{runs}/{name}/"))
    config["run"] = name
    config["engine"]["device"] = options.device
    values: dict[str, Any] = {}
    if options.small:
        values = {
            "data.validation": 2,
            "trainer.tasks_per_step": 2,
            "trainer.group_size": 2,
            "evaluation.samples": 1,
        }
    values.update(changes)
    for key, value in values.items():
        set_value(config, key.split("."), value)
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return run


def set_value(section: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a value by its path of keys; `*` stands for every entry of a section."""
    key, *rest = keys
    names = list(section) if key == "*" else [key]
    for name in names:
        if rest:
            set_value(section[name], rest, value)
        else:
            section[name] = value


def train_run(run: Path, on_step: Callable[[int], None] | None = None) -> None:
    """Run `mcore-mas train` and print each step's metrics as they are written.

    Raises:
        SystemExit: the training ended with another status than 0; its last three lines are printed.
    """
    metrics_file = run / "train" / "metrics.jsonl"
    began = time.perf_counter()
    offset = 0
    peak_mib: int | None = None
    with (run / "train.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "mcore_mas", "train", str(run / "config.yaml")],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        ended = False
        while not ended:
            ended = process.poll() is not None
            peak_mib = max_or_none(peak_mib, memory_in_use_mib())
            if metrics_file.is_file():
                rows, offset = read_json_lines(metrics_file, offset)
                for row in rows:
                    _print_step(run.name, row, peak_mib)
                    if on_step is not None:
                        on_step(int(row["step"]))
            if not ended:
                time.sleep(POLL_S)
    if process.returncode:
        lines = (run / "train.log").read_text(errors="replace").splitlines()
        last_lines = [line for line in lines if line.strip()][-3:]
        say(
            run=run.name, failed=f"exit status {process.returncode}: {' | '.join(last_lines)}"[:600]
        )
        raise SystemExit(process.returncode)
    say(
        run=run.name,
        seconds=round(time.perf_counter() - began, 1),
        peak_mib=peak_mib,
        done=(run / "train" / "done.json").is_file(),
    )


def _print_step(run: str, row: Mapping[str, Any], peak_mib: int | None) -> None:
    """Print a step's reward, times, rates and largest log-probability gap, and the peak of the memory so far."""
    metrics = {name: round(row[name], 4) for name in STEP_METRICS if name in row}
    if "time/collect_s" in row:
        trained = sum(row.get(f"agent/{agent}/tokens", 0.0) for agent in AGENTS)
        metrics["sampled_tokens_per_s"] = round(row["rollout/tokens"] / row["time/collect_s"])
        metrics["trained_tokens_per_s"] = round(trained / row["time/update_s"])
    gaps = [value for name, value in row.items() if name.endswith("/logprob_gap_max")]
    if gaps:
        metrics["logprob_gap_max"] = max(gaps)
    if "validation/accuracy" in row:
        metrics["validation/accuracy"] = round(row["validation/accuracy"], 4)
    say(run=run, step=row["step"], peak_mib=peak_mib, **metrics)


def run_command(*arguments: str) -> None:
    """Run a command of `mcore-mas`; if it fails, print its last line and raise SystemExit."""
    command = [sys.executable, "-W", "ignore", "-m", "mcore_mas", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        lines = [line for line in completed.stderr.splitlines() if line.strip()]
        say(failed=f"mcore-mas {arguments[0]}: {lines[-1] if lines else 'no output'}"[:600])
        raise SystemExit(completed.returncode)


def memory_in_use_mib() -> int | None:
    """Return the memory in use on the first GPU as nvidia-smi reports it; None without one."""
    if device().type != "cuda" and not Path("/dev/nvidiactl").exists():
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    completed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return int(completed.stdout) if completed.returncode == 0 else None


def max_or_none(first: int | None, second: int | None) -> int | None:
    """Return the larger of two numbers, or the one that is known."""
    numbers = [number for number in (first, second) if number is not None]
    return max(numbers, default=None)


_ALL = (
    start,
    train,
    evaluate,
    idle,
    train_bf16,
    published_shape,
    killed_rank,
    engine,
    sleep,
    mixture,
    attention,
    head,
)
SECTIONS: dict[str, Callable[[Options], None]] = {section.__name__: section for section in _ALL}


if __name__ == "__main__":
    main()
