"""Cold start: supervised fine-tuning of a small random model on demonstrations, until its replies are well formed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from mcore_mas.config.policy import ColdStartConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.pipeline.base_model import run_demonstrations
from mcore_mas.rollout.base.files import write_json
from mcore_mas.rollout.config.data import prepared_tasks
from mcore_mas.rollout.config.sections import build_team
from mcore_mas.rollout.engines import EngineClient
from mcore_mas.rollout.engines.embedded.batching import LocalEngine
from mcore_mas.rollout.environments.protocol import Env
from mcore_mas.rollout.models.chat_template import Renderer
from mcore_mas.rollout.records.trajectory import Demonstration, Task
from mcore_mas.rollout.teams.collect import collect
from mcore_mas.training.engine_factory import world
from mcore_mas.training.logbook import Reporter
from mcore_mas.training.metrics import success

_Measure = Callable[[MegatronTrainer, int], tuple[float, float]]  # (accuracy, share of well-formed turns) after a step

_POLICY = "cold start"
_BETAS = (0.9, 0.98)  # of Adam: a cold start is short


def bootstrap(config_path: Path, base_dir: Path, out_dir: Path) -> None:
    """Fine-tune `base_dir` into `out_dir`/model, one model that every policy starts from.

    Stops as soon as a measurement of the team on validation tasks is legal and accurate enough, or after max_steps;
    `out_dir`/bootstrap.json says which, with all measurements.
    """
    config = RunConfig.load(config_path)
    cold_start = config.cold_start
    assert cold_start is not None, "a run without a cold start brings its own model"
    init_process_groups(rank=0, threads=config.cluster.threads_per_process or 1)
    spec = TrainerSpec(
        model=str(base_dir),
        lr=cold_start.lr,
        warmup_steps=cold_start.warmup_steps,
        betas=_BETAS,
        objective=Objective(loss="cross_entropy"),
    )
    trainer = MegatronTrainer(spec)
    renderer = Renderer(base_dir)
    with ExitStack() as stack:
        stack.callback(destroy_process_groups)
        make_env = stack.enter_context(world(config, "bootstrap/retriever"))
        reporter = stack.enter_context(Reporter(f"{config.run} bootstrap", cold_start.max_steps))
        measure = _measurement(config, cold_start, base_dir, renderer, make_env)
        history: list[dict[str, float]] = []
        started = time.monotonic()
        for step, batch in enumerate(_batches(config, cold_start, renderer), start=1):
            metrics = trainer.update(pack(batch, config.trainer.microbatch_tokens))
            if (step % cold_start.check_every and step < cold_start.max_steps) or step < cold_start.first_check:
                continue
            accuracy, legal = measure(trainer, step)
            loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
            shown = {"loss": loss, "accuracy": accuracy, "legal": legal}
            history.append({"step": step, "seconds": time.monotonic() - started, **shown})
            reporter.step(step, shown)
            if legal >= cold_start.stop_legal and accuracy >= cold_start.stop_accuracy:
                break
        trainer.model.write(out_dir / "model")
    write_json(out_dir / "bootstrap.json", {"model": str(out_dir / "model"), "history": history})


def _measurement(
    config: RunConfig, cold_start: ColdStartConfig, base_dir: Path, renderer: Renderer, make_env: Callable[[Task], Env]
) -> _Measure:
    """How to measure the team, on the trainer's weights after a step, on a few validation tasks."""
    engine = LocalEngine(base_dir, rows=config.engine.slots, max_length=config.engine.max_length)
    player = EngineClient(engine=engine, renderer=renderer)
    team = build_team(config.agents, dict.fromkeys(config.policies, player))
    orchestra = config.orchestra.call
    tasks = prepared_tasks(config.folder / "tasks", "validation")[: cold_start.check_tasks]

    async def measure(trainer: MegatronTrainer, step: int) -> tuple[float, float]:
        await engine.load_weights(trainer.model.weights(), version=step)
        return success(await collect(tasks, team, make_env, orchestra, group_size=1, seed=config.seed, step=step))

    return lambda trainer, step: asyncio.run(measure(trainer, step))


def _batches(config: RunConfig, cold_start: ColdStartConfig, renderer: Renderer) -> Iterator[list[Sample]]:
    """`max_steps` batches of samples, each weighted to a token mean."""
    stream = run_demonstrations(config, cold_start, cold_start.max_steps * cold_start.batch)
    # one micro-batch holds one agent's samples, and nobody asks here which agent a gradient came from
    while batch := [_sample(demonstration, renderer) for demonstration in islice(stream, cold_start.batch)]:
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
