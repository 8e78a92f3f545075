"""Export of one policy of a run: its finished model, or the newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.training.checkpoint import newest
from mcore_mas.training.recipe import identity_of


class ExportError(ValueError):
    """Nothing can be exported as asked: one line that says what, where, what to do."""


def export(run: Path, policy: str, to: Path, note: Callable[[str], None], *, adapter: bool = False) -> None:
    """Write `policy` of the run in folder `run` to the folder `to`, which must be empty or not there.

    Args:
        note: told where the weights come from, and of checkpoints that cannot be trusted.
        adapter: write the adapter alone, in PEFT's format, instead of the whole model.

    Raises:
        ExportError: there is no such policy or adapter, `to` holds something, or nothing has been trained yet.
        ConfigError, ModelError: the run's config or model is not there.
    """
    config = RunConfig.load(run / "config.yaml")
    _check(config, run, policy, adapter=adapter)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to}: something is there already; name a folder that is empty or not there")
    finished = run / "train" / "models" / policy
    if (run / "train" / "done.json").is_file():
        source = finished / "adapter" if adapter else finished
        note(f"{policy} from {source}")
        shutil.copytree(source, to, dirs_exist_ok=True)
        return
    checkpoints = run / "train" / "checkpoints"
    found = newest(checkpoints, identity_of(config), note) if checkpoints.is_dir() else None
    if found is None:
        raise ExportError(f"{run}: no finished model and no valid checkpoint; train it first")
    note(f"{policy} from {found.folder}")
    _write(config, policy, found.folder / policy, to, adapter=adapter)


def _check(config: RunConfig, run: Path, policy: str, *, adapter: bool) -> None:
    if policy not in config.policies:
        raise ExportError(f"{run}: no policy '{policy}'; policies: {', '.join(config.policies)}")
    if policy not in config.trained:
        raise ExportError(f"{run}: policy '{policy}' is frozen; it is {config.policies[policy].model}")
    if adapter and config.policies[policy].lora is None:
        raise ExportError(f"{run}: policy '{policy}' trains all weights and has no adapter; leave out --adapter")


def _write(config: RunConfig, policy: str, checkpoint: Path, to: Path, *, adapter: bool) -> None:
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer
    from mcore_mas.training.policy_trainer import policy_spec

    spec = policy_spec(policy, config)
    spec = replace(spec, tp=1, pp=1, vpp=1, cp=1, dp=1, sp=False, distributed_optimizer=False, overlap=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    init_process_groups(rank=0, threads=config.cluster.threads_per_process)
    try:
        trainer = MegatronTrainer(spec)
        trainer.restore(checkpoint)
        (trainer.model.write_adapter if adapter else trainer.model.write)(to)
    finally:
        destroy_process_groups()
