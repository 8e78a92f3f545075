"""Cold start: supervised fine-tuning (SFT) of a small random model on generated demonstrations.

It ends when the replies of the team are valid and accurate enough for reinforcement learning.
"""

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from mcore_mas.config.cold_start import ColdStartConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.pipeline.base_model import generate_demonstrations
from mcore_mas.pipeline.sharing import settings_digest
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import Checkpoints, WaitWritten
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

# Name of policy and agent in the samples of a fine-tuning.
POLICY = "cold start"
# Adam's decay rates. The second one is lower than usual because a cold start has few steps.
_BETAS = (0.9, 0.98)

# One measurement: step, seconds since the start, loss, accuracy, and the share of well-formed turns
# (`legal`).
_Measurement = dict[str, float]


def bootstrap(config_path: Path, base_dir: Path, out_dir: Path) -> None:
    """Fine-tune a base model into `out_dir`/model, for all policies whose `model` is that folder.

    Training stops when the team's accuracy and its share of well-formed turns on validation tasks
    are high enough, or after max_steps. `out_dir`/bootstrap.json gets the model's folder and all
    measurements. An interrupted cold start continues from its newest checkpoint.

    Args:
        config_path: resolved config of the run.
        base_dir: folder of the base model and its tokenizer.
        out_dir: folder of the cold start.

    Raises:
        Stopped: a stop signal arrived. In a Slurm job, `requeue_when_stopped` blocks the signals,
            so that they stay pending until the end of a step, and its checkpoint is saved first.
            Elsewhere the step is broken off, and no checkpoint is saved for it.
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
        team_evaluator = _TeamEvaluator(config, cold_start, base_dir, renderer, make_env)

        checkpoints = _open_checkpoints(out_dir / "checkpoints", config, base_dir)
        step = 0
        history: list[_Measurement] = []
        checkpoint = checkpoints.recover_newest(print)
        if checkpoint:
            trainer.restore(checkpoint.folder)
            print(f"continuing from {checkpoint.folder}")
            step = checkpoint.step
            history = checkpoint.state["history"]

        reporter = stack.enter_context(
            ProgressReporter(f"{config.run} bootstrap", cold_start.max_steps, step)
        )
        earlier_seconds = history[-1]["seconds"] if history else 0.0
        started = time.monotonic() - earlier_seconds
        for batch in _batches(config, cold_start, renderer, start_step=step):
            if history and _is_good_enough(history[-1], cold_start):
                break

            step += 1
            metrics = trainer.update(pack(batch, config.trainer.microbatch_tokens))

            check_due = step % cold_start.check_every == 0 or step == cold_start.max_steps
            if check_due and step >= cold_start.first_check:
                accuracy, legal = team_evaluator.evaluate(trainer, step)
                loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
                measurement = {"loss": loss, "accuracy": accuracy, "legal": legal}
                seconds = time.monotonic() - started
                history.append({"step": step, "seconds": seconds, **measurement})
                reporter.step(step, measurement)

            pending = signal.sigpending() & set(STOP_SIGNALS)
            if check_due or pending:
                asyncio.run(_save(checkpoints, trainer, step, history))
            if pending:
                name = signal.Signals(min(pending)).name
                raise Stopped(f"stopped by {name} after step {step}; its checkpoint is saved")

        trainer.model.write(out_dir / "model")
    write_json(out_dir / "bootstrap.json", {"model": str(out_dir / "model"), "history": history})
    shutil.rmtree(out_dir / "checkpoints")


def _is_good_enough(measurement: _Measurement, cold_start: ColdStartConfig) -> bool:
    return (
        measurement["legal"] >= cold_start.stop_legal
        and measurement["accuracy"] >= cold_start.stop_accuracy
    )


def _open_checkpoints(folder: Path, config: RunConfig, base_dir: Path) -> Checkpoints:
    """Return the checkpoints of a cold start.

    Their folder is named after the settings and the base model, so that a cold start with other
    settings or another base model does not continue from them.
    """
    settings = settings_digest(config.model_dump(mode="json"), "cold_start")
    base = sha256(*sorted(base_dir.iterdir()))
    identity = Identity(run=config.run, models={}, inputs={"settings": settings, "base": base})
    return Checkpoints(folder / f"{settings}-{base}"[:40], identity, keep=1)


async def _save(
    checkpoints: Checkpoints, trainer: MegatronTrainer, step: int, history: list[_Measurement]
) -> None:
    """Save a checkpoint of `step` and wait until it is complete."""

    async def start_saving(folder: Path) -> WaitWritten:
        """Copy the trainer's state; return a function that waits until the files are written."""
        trainer.save(folder)

        async def wait_for_files() -> dict[str, Digest]:
            return trainer.wait_written()

        return wait_for_files

    await checkpoints.save(step, {"history": history}, start_saving)
    await checkpoints.finish()


class _TeamEvaluator:
    """Evaluation of the team on a few validation tasks, with the trainer's weights."""

    def __init__(
        self,
        config: RunConfig,
        cold_start: ColdStartConfig,
        base_dir: Path,
        renderer: Renderer,
        make_env: Callable[[Task], Env],
    ) -> None:
        self._engine = LocalEngine(
            EmbeddedEngine.from_folder(
                base_dir, rows=config.engine.slots, max_length=config.engine.max_length
            )
        )
        client = EngineClient(engine=self._engine, renderer=renderer)
        self._team = build_team(config.agents, dict.fromkeys(config.policies, client))
        self._make_env = make_env
        self._orchestra = config.orchestra.call
        self._seed = config.seed
        validation_tasks = prepared_tasks(config.folder / "tasks", "validation")
        self._tasks = validation_tasks[: cold_start.check_tasks]

    def evaluate(self, trainer: MegatronTrainer, step: int) -> tuple[float, float]:
        """Return accuracy and share of well-formed turns after a step."""
        return asyncio.run(self._evaluate(trainer, step))

    async def _evaluate(self, trainer: MegatronTrainer, step: int) -> tuple[float, float]:
        await self._engine.load_weights(trainer.model.weights(), version=step)
        collector = Collector(
            team=self._team,
            make_env=self._make_env,
            orchestra=self._orchestra,
            seed=self._seed,
            step=step,
        )
        groups = await collector.collect(self._tasks, 1)
        return mean_success(groups), valid_turn_share(groups)


def _batches(
    config: RunConfig, cold_start: ColdStartConfig, renderer: Renderer, start_step: int
) -> Iterator[list[Sample]]:
    """Yield the batches of the steps after `start_step`, up to max_steps in total.

    Samples are weighted so that the loss of a batch is a mean over its tokens.
    """
    stream = generate_demonstrations(config, cold_start, cold_start.max_steps * cold_start.batch)
    stream = islice(stream, start_step * cold_start.batch, None)
    while True:
        demonstrations = list(islice(stream, cold_start.batch))
        if not demonstrations:
            return
        samples = [
            demonstration_sample(demonstration, renderer) for demonstration in demonstrations
        ]
        yield weigh(samples, {POLICY: 1.0})


def demonstration_sample(demonstration: Demonstration, renderer: Renderer) -> Sample:
    """Return a demonstration as a sample whose assistant tokens are trained.

    All samples name the same agent, because a micro-batch holds samples of one agent and gradients
    by agent are not measured here.
    """
    ids, trained = renderer.tokenize_dialogue(demonstration.messages)
    return Sample(
        policy=POLICY,
        agent=POLICY,
        task="",
        trajectory="",
        turn=0,
        prompt_ids=(),
        completion_ids=ids,
        trained=trained,
    )
