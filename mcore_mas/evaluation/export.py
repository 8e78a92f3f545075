"""Export of a trained policy as a model folder in Hugging Face format, or of its adapter alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.export_check import ExportError, check_export
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import newest_checkpoint
from mcore_mas.runtime.recipe import identity_of
from rollout.base.digests import check_tree
from rollout.base.files import atomic_folder, check_output_path
from rollout.base.hints import nearest_hint
from rollout.base.json_files import read_record
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Turn

if TYPE_CHECKING:
    from mcore_mas.megatron.spec import TrainerSpec

# Number of recorded turns that an export is compared with.
_CHECKED_TURNS = 32
# Subfolder to which an export to an existing folder is first written. `atomic_folder` gives the subfolder the
# second name until it is complete; a failed export leaves it under that name.
_STAGING = "export"
_PARTIAL_STAGING = f".{_STAGING}.partial"


def export(
    run: Path, policy: str, to: Path, note: Callable[[str], None], *, adapter: bool = False
) -> None:
    """Write a trained policy to a folder, and check that transformers reads it as the run did.

    The weights are those of the finished run or, before its end, of its newest valid checkpoint.
    `check_export` checks the folder. An adapter alone is not checked.

    Args:
        run: folder of the run.
        policy: name of the policy.
        to: folder that is empty or does not exist.
        note: called with lines about the source of the weights, invalid checkpoints and the checks.
        adapter: write the adapter alone, in PEFT's format, in place of the whole model.

    Raises:
        ExportError: there is no such policy or adapter, `to` is not empty, nothing has been trained
            yet, or transformers gives other token ids or log-probabilities.
        ConfigError, ModelError: the run's config or model is missing.
        FolderError: `to` cannot be written, or a file of the finished model is not as training wrote it.
    """
    config = RunConfig.load(run / "config.yaml")
    _check_policy(config, run, policy, adapter=adapter)
    check_output_path(to)
    if to.exists() and not _is_empty_folder(to):
        raise ExportError(
            f"{to}: something is there already; name a folder that is empty or not there"
        )

    checkpoint = None
    if not (run / "train" / "done.json").is_file():
        checkpoint = _checkpoint_to_export(config, run, note)

    # An existing `to` is not replaced, because a shell may have it as its working directory. The export is
    # then written to a folder inside it, whose files are moved up at the end.
    target = to.absolute()
    to_exists = target.is_dir()
    staging = target / _STAGING if to_exists else target
    with atomic_folder(staging) as partial:
        if checkpoint is None:
            _copy_finished_model(run, policy, partial, note, adapter=adapter)
        else:
            note(f"{policy} from {checkpoint}")
            _write_checkpoint(config, policy, checkpoint / policy, partial, adapter=adapter)
        if not adapter:
            check_export(partial, config.policies[policy], _recorded_turns(run, policy), note)
        _share_by_umask(partial)
    if to_exists:
        for path in staging.iterdir():
            path.rename(target / path.name)
        staging.rmdir()


def _is_empty_folder(path: Path) -> bool:
    """Return True if a path is a folder that has nothing but what a failed export left."""
    return path.is_dir() and all(child.name == _PARTIAL_STAGING for child in path.iterdir())


def _checkpoint_to_export(config: RunConfig, run: Path, note: Callable[[str], None]) -> Path:
    """Return the folder of the newest valid checkpoint of a run.

    Raises:
        ExportError: there is none.
    """
    checkpoints = run / "train" / "checkpoints"
    checkpoint = None
    if checkpoints.is_dir():
        checkpoint = newest_checkpoint(checkpoints, identity_of(config), note)
    if checkpoint is None:
        raise ExportError(f"{run}: no finished model and no valid checkpoint; train it first")
    return checkpoint.folder


def _copy_finished_model(
    run: Path, policy: str, to: Path, note: Callable[[str], None], *, adapter: bool
) -> None:
    """Copy the model of a policy of a finished run, or its adapter alone, to an empty folder.

    Raises:
        FolderError: a file of the model is not as training wrote it.
    """
    model = run / "train" / "models" / policy
    done = read_record(run / "train" / "done.json")
    check_tree(model, done.get("sha256", {}).get(policy, {}))
    source = model / "adapter" if adapter else model
    note(f"{policy} from {source}")
    shutil.copytree(source, to, dirs_exist_ok=True)


def _share_by_umask(folder: Path) -> None:
    """Give a folder and its files the permissions that the user's umask leaves to new ones.

    The folders of a run are private, but an export is often read by another account, such as that of a server.
    """
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _check_policy(config: RunConfig, run: Path, policy: str, *, adapter: bool) -> None:
    """Raise ExportError unless the run trains this policy, and an adapter if `adapter`."""
    if policy not in config.policies:
        hint = nearest_hint(policy, config.policies)
        raise ExportError(
            f"{run}: no policy '{policy}'; policies: {', '.join(config.policies)}{hint}"
        )
    if policy not in config.trained:
        raise ExportError(
            f"{run}: policy '{policy}' is frozen; it is {config.policies[policy].model}"
        )
    if adapter and config.policies[policy].lora is None:
        raise ExportError(
            f"{run}: policy '{policy}' trains all weights and has no adapter; leave out --adapter"
        )


def one_rank_spec(config: RunConfig, policy: str) -> TrainerSpec:
    """Return the specification of a policy's trainer on one rank, with layers that need no Transformer Engine."""
    from mcore_mas.runtime.trainer_specs import policy_spec

    return replace(
        policy_spec(policy, config),
        tp=1,
        pp=1,
        vpp=1,
        cp=1,
        dp=1,
        ep=1,
        sp=False,
        distributed_optimizer=False,
        overlap=False,
        layers="local",
        fp8=None,
    )


def _write_checkpoint(
    config: RunConfig, policy: str, checkpoint: Path, to: Path, *, adapter: bool
) -> None:
    """Load a policy's checkpoint on one rank in this process, and write it to a folder."""
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    spec = one_rank_spec(config, policy)
    with hide_gpus_from_cpu_run(config):
        init_process_groups(rank=0, threads=config.cluster.threads_per_process or 1)
        try:
            trainer = MegatronTrainer(spec)
            trainer.restore(checkpoint)
            if adapter:
                trainer.model.write_adapter(to)
            else:
                trainer.model.write(to)
        finally:
            destroy_process_groups()


def _recorded_turns(run: Path, policy: str) -> list[Turn]:
    """Return up to _CHECKED_TURNS turns of a policy in the newest recorded step; [] if no step is recorded."""
    files = sorted((run / "train" / "trajectories").glob("step_*.parquet"))
    if not files:
        return []
    turns: list[Turn] = []
    for trajectory in read_trajectories(files[-1]):
        turns += [turn for turn in trajectory.turns if turn.policy == policy]
    return turns[:_CHECKED_TURNS]
