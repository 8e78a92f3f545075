"""The cold start: supervised fine-tuning on demonstrations until the team is legal, and far from its ceiling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from mcore_mas.base_model import demonstrations
from mcore_mas.cold_start_config import ColdStartConfig
from mcore_mas.config import RunConfig
from mcore_mas.core.losses import Objective
from mcore_mas.files import write_json
from mcore_mas.megatron import parallel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.trainer import MegatronTrainer
from mcore_mas.metrics import success
from mcore_mas.packing import pack
from mcore_mas.progress import Reporter
from mcore_mas.samples import Sample, weigh
from mcore_mas.world import world
from rollout.build import build_orchestra, build_team
from rollout.collect import collect
from rollout.engines.local import LocalEngine
from rollout.envs.protocol import Env
from rollout.records import Demonstration, Task, read_tasks
from rollout.renderer import Renderer
from rollout.team import Player

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
    parallel.start(rank=0, threads=config.cluster.threads_per_process)
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
        stack.callback(parallel.stop)
        make_env = stack.enter_context(world(config, "bootstrap/retriever"))
        reporter = stack.enter_context(Reporter(f"{config.run} bootstrap", cold_start.max_steps))
        team = _Team(config, base_dir, renderer, make_env)
        history = _train(cold_start, trainer, _batches(config, cold_start, renderer), team, config, reporter)
        trainer.write_model(out_dir / "model")
    write_json(out_dir / "bootstrap.json", {"model": str(out_dir / "model"), "history": history})


class _Team:
    """The team on the weights of the moment, measured on a few validation tasks."""

    def __init__(self, config: RunConfig, base_dir: Path, renderer: Renderer, make_env: Callable[[Task], Env]) -> None:
        assert config.cold_start is not None
        self.engine = LocalEngine(base_dir, rows=config.engine.slots, max_length=config.engine.max_length)
        player = Player(engine=self.engine, renderer=renderer)
        self._team = build_team(config.agents, dict.fromkeys(config.policies, player))
        self._orchestra = build_orchestra(config.orchestra)
        self._make_env = make_env
        self._tasks = read_tasks(config.folder / "tasks" / "validation.parquet")[: config.cold_start.check_tasks]

    def measure(self, trainer: MegatronTrainer, step: int, seed: int) -> tuple[float, float]:
        """(accuracy, share of well-formed turns)."""

        async def play() -> tuple[float, float]:
            await self.engine.load_weights(trainer.weights(), version=step)
            groups = await collect(
                self._tasks, self._team, self._make_env, self._orchestra, group_size=1, seed=seed, step=step
            )
            return success(groups)

        return asyncio.run(play())


def _train(
    cold_start: ColdStartConfig,
    trainer: MegatronTrainer,
    batches: Iterator[list[Sample]],
    team: _Team,
    config: RunConfig,
    reporter: Reporter,
) -> list[dict[str, float]]:
    history: list[dict[str, float]] = []
    started = time.monotonic()
    for step, batch in enumerate(batches, start=1):
        metrics = trainer.update(pack(batch, config.trainer.microbatch_tokens))
        if (step % cold_start.check_every and step < cold_start.max_steps) or step < cold_start.first_check:
            continue
        accuracy, legal = team.measure(trainer, step, config.seed)
        loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
        shown = {"loss": loss, "accuracy": accuracy, "legal": legal}
        history.append({"step": step, "seconds": time.monotonic() - started, **shown})
        reporter.step(step, shown)
        if legal >= cold_start.stop_legal and accuracy >= cold_start.stop_accuracy:
            break
    return history


def _batches(config: RunConfig, cold_start: ColdStartConfig, renderer: Renderer) -> Iterator[list[Sample]]:
    """`max_steps` batches of samples, each weighted to a token mean."""
    stream = demonstrations(config, cold_start, cold_start.max_steps * cold_start.batch)
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
