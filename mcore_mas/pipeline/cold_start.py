"""Cold start: supervised fine-tuning (SFT) of a small random model on demonstrations, until its replies are valid."""

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from mcore_mas.config.cold_start import ColdStartConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.pipeline.base_model import run_demonstrations
from mcore_mas.pipeline.sharing import settings_digest
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import Checkpoints
from mcore_mas.runtime.recipe import Identity
from mcore_mas.runtime.run_environments import open_environments
from mcore_mas.runtime.stop_signal import STOP_SIGNALS, Stopped
from mcore_mas.tracking.progress import ProgressReporter
from mcore_mas.training.metrics import mean_success, valid_turn_share
from rollout.base.digests import Digest, sha256
from rollout.base.json_files import write_json
from rollout.config.agents import build_team
from rollout.config.tasks import prepared_tasks
from rollout.engines import EngineClient
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Demonstration, Task
from rollout.teams.collect import Collector

_Measure = Callable[
    [MegatronTrainer, int], tuple[float, float]
]  # (accuracy, share of well-formed turns) after a step

_POLICY = "cold start"
_BETAS = (0.9, 0.98)  # of Adam: a cold start is short


def bootstrap(config_path: Path, base_dir: Path, out_dir: Path) -> None:
    """Fine-tune `base_dir` into `out_dir`/model, one model that every policy starts from.

    Stops as soon as a measurement of the team on validation tasks is legal and accurate enough, or after max_steps;
    `out_dir`/bootstrap.json says which, with all measurements. One that was ended goes on from its last checkpoint.

    Raises:
        Stopped: a signal that is blocked waits (`requeue_when_stopped`); what was learned is saved.
    """
    config = RunConfig.load(config_path)
    cold_start = config.cold_start
    assert cold_start is not None, "a run without a cold start brings its own model"
    spec = TrainerSpec(
        model=str(base_dir),
        lr=cold_start.lr,
        warmup_steps=cold_start.warmup_steps,
        betas=_BETAS,
        objective=Objective(loss="cross_entropy"),
    )
    renderer = Renderer(base_dir)
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        init_process_groups(rank=0, threads=config.cluster.threads_per_process or 1)
        stack.callback(destroy_process_groups)
        trainer = MegatronTrainer(spec)
        make_env = stack.enter_context(open_environments(config, "bootstrap/retriever"))
        measure = _measurement(config, cold_start, base_dir, renderer, make_env)
        checkpoints = _checkpoints(out_dir / "checkpoints", config, base_dir)
        step, history = 0, list[dict[str, float]]()
        if saved := checkpoints.newest(print):
            trainer.restore(saved.folder)
            print(f"continuing from {saved.folder}")
            step, history = saved.step, saved.state["history"]
        reporter = stack.enter_context(
            ProgressReporter(f"{config.run} bootstrap", cold_start.max_steps, step)
        )
        started = time.monotonic() - (history[-1]["seconds"] if history else 0.0)
        for batch in _batches(config, cold_start, renderer, step):
            last = history[-1] if history else None
            if (
                last
                and last["legal"] >= cold_start.stop_legal
                and last["accuracy"] >= cold_start.stop_accuracy
            ):
                break
            step += 1
            metrics = trainer.update(pack(batch, config.trainer.microbatch_tokens))
            due = step % cold_start.check_every == 0 or step == cold_start.max_steps
            if due and step >= cold_start.first_check:
                accuracy, legal = measure(trainer, step)
                loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
                shown = {"loss": loss, "accuracy": accuracy, "legal": legal}
                history.append({"step": step, "seconds": time.monotonic() - started, **shown})
                reporter.step(step, shown)
            told = signal.sigpending() & set(STOP_SIGNALS)
            if due or told:
                asyncio.run(_save(checkpoints, trainer, step, history))
            if told:
                raise Stopped(
                    f"stopped by {signal.Signals(min(told)).name} after step {step}; all of it is saved"
                )
        trainer.model.write(out_dir / "model")
    write_json(out_dir / "bootstrap.json", {"model": str(out_dir / "model"), "history": history})
    shutil.rmtree(out_dir / "checkpoints")


def _checkpoints(folder: Path, config: RunConfig, base_dir: Path) -> Checkpoints:
    """Those of a cold start, in a folder for its settings and its base model: others start anew."""
    settings, base = (
        settings_digest(config.model_dump(mode="json"), "start"),
        sha256(*sorted(base_dir.iterdir())),
    )
    identity = Identity(run=config.run, models={}, inputs={"settings": settings, "base": base})
    return Checkpoints(folder / f"{settings}-{base}"[:40], identity, keep=1)


async def _save(
    checkpoints: Checkpoints, trainer: MegatronTrainer, step: int, history: list[dict[str, float]]
) -> None:
    """Save all that is needed to go on after `step`."""

    async def write(folder: Path) -> Any:
        trainer.save(folder)

        async def written() -> dict[str, Digest]:
            return trainer.written()

        return written

    await checkpoints.save(step, {"history": history}, write)
    await checkpoints.finish()


def _measurement(
    config: RunConfig,
    cold_start: ColdStartConfig,
    base_dir: Path,
    renderer: Renderer,
    make_env: Callable[[Task], Env],
) -> _Measure:
    """How to measure the team, on the trainer's weights after a step, on a few validation tasks."""
    engine = LocalEngine(
        EmbeddedEngine.from_folder(
            base_dir, rows=config.engine.slots, max_length=config.engine.max_length
        )
    )
    player = EngineClient(engine=engine, renderer=renderer)
    team = build_team(config.agents, dict.fromkeys(config.policies, player))
    orchestra = config.orchestra.call
    tasks = prepared_tasks(config.folder / "tasks", "validation")[: cold_start.check_tasks]

    async def measure(trainer: MegatronTrainer, step: int) -> tuple[float, float]:
        await engine.load_weights(trainer.model.weights(), version=step)
        collector = Collector(
            team=team, make_env=make_env, orchestra=orchestra, seed=config.seed, step=step
        )
        groups = await collector.collect(tasks, 1)
        return mean_success(groups), valid_turn_share(groups)

    return lambda trainer, step: asyncio.run(measure(trainer, step))


def _batches(
    config: RunConfig, cold_start: ColdStartConfig, renderer: Renderer, taken: int
) -> Iterator[list[Sample]]:
    """`max_steps` batches of samples, each weighted to a token mean, without those of the first `taken` steps."""
    stream = run_demonstrations(config, cold_start, cold_start.max_steps * cold_start.batch)
    stream = islice(stream, taken * cold_start.batch, None)
    # one micro-batch holds one agent's samples, and nobody asks here which agent a gradient came from
    while batch := [
        _sample(demonstration, renderer) for demonstration in islice(stream, cold_start.batch)
    ]:
        yield weigh(batch, {_POLICY: 1.0})


def _sample(demonstration: Demonstration, renderer: Renderer) -> Sample:
    ids, written = renderer.dialogue(demonstration.messages)
    return Sample(
        policy=_POLICY,
        agent=_POLICY,
        task="",
        trajectory="",
        turn=0,
        prompt_ids=(),
        completion_ids=ids,
        trained=written,
    )
