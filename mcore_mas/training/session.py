"""Training with all processes up: load the weights, take all steps, write the models."""

import asyncio
from functools import partial
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.checkpoint import Checkpoint
from mcore_mas.runtime.full_disk import retry_while_full
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.weight_sync import Resender, resend_lost_weights


def model_folder(config: RunConfig, policy: str) -> Path:
    """Return the folder of a policy's trained model in Hugging Face format."""
    return config.folder / "train" / "models" / policy


async def train_session(
    session: TrainingSession, checkpoint: Checkpoint | None, *, engines_may_be_newer: bool
) -> Checkpoint | None:
    """Take all steps of a run, and write a model folder for each trained policy.

    Args:
        session: parts of the run.
        checkpoint: checkpoint to continue from; None: the run starts.
        engines_may_be_newer: the engines have run before, and may serve later weights than those
            that training starts from.

    Returns:
        The best checkpoint, if the models are written from it (`trainer.final: best`); None if they
        are those of the last step.
    """
    await session.stop.run_until_stopped(
        load_weights(session, checkpoint, engines_may_be_newer=engines_may_be_newer),
        message=" while it was loading; the same command continues",
    )
    opponents = session.rollouts.opponents
    resenders: list[Resender] = list(session.weight_sync.values())
    if opponents is not None:
        resenders += opponents.with_past
    async with resend_lost_weights(resenders):
        if checkpoint is None:
            await train_steps(session, 0)
        else:
            unreported_metrics = checkpoint.state["unreported"]
            await train_steps(session, checkpoint.step, unreported_metrics)

    best = None
    if session.config.trainer.final == "best":
        best = session.checkpoints.best(session.logbook.note)
    if best is not None:
        await _restore(session, best)
    for policy, trainer in session.trainers.items():
        folder = model_folder(session.config, policy)
        group = trainer.groups[policy]
        await retry_while_full(partial(group.write_model, folder), folder)
    return best


async def load_weights(
    session: TrainingSession, checkpoint: Checkpoint | None, *, engines_may_be_newer: bool
) -> None:
    """Wait until the ranks have loaded their models; restore a checkpoint and sync the engines.

    Engines of a run that starts have the weights already, except those of policies that start with
    an adapter: these engines have only the base model.
    """
    await asyncio.gather(*(group.ready() for group in session.groups.values()))
    stale_engines = []
    for policy in session.weight_sync:
        lora = session.config.policies[policy].lora
        starts_with_adapter = lora is not None and lora.adapter is not None
        if checkpoint is not None or engines_may_be_newer or starts_with_adapter:
            stale_engines.append(policy)

    if stale_engines and session.config.engine.sleep:
        # A server starts at its first request, even if this request makes it sleep. It chooses the
        # size of its KV cache by the memory that is free, so the trainers are offloaded meanwhile.
        async with session.memory.rollout(stale_engines):
            pass
    if checkpoint is not None:
        await _restore(session, checkpoint)
        return
    for policy in stale_engines:
        await session.weight_sync[policy].push(0)


async def _restore(session: TrainingSession, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into all ranks, and sync its weights to the engines under their saved version."""
    for name, group in session.groups.items():
        await group.restore(checkpoint.folder / name)
    versions = checkpoint.state.get("versions", {})
    for policy, sync in session.weight_sync.items():
        policy_versions = versions.get(policy, [checkpoint.step])
        await sync.push(policy_versions[-1])
