"""Check that the checkpoints of a run can continue with its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.suite import Suite
from mcore_mas.runtime.checkpoint_manifest import ManifestError, read_checkpoint_manifest
from mcore_mas.runtime.input_digests import recipe_module_digests
from mcore_mas.runtime.recipe import Identity, describe_differences, recipe_of


def recipe_problems(suite: Suite) -> list[str]:
    """Return one line for each run of a suite whose checkpoints training would refuse."""
    lines = []
    for run in suite.runs:
        problem = recipe_problem(suite.run_config(run))
        if problem:
            lines.append(f"run '{run}': {problem}")
    return lines


def recipe_problem(config: RunConfig) -> str:
    """Return why training would refuse the checkpoints of a run for its recipe, or "".

    The settings and the user's modules are compared. Tasks, models and other inputs are compared
    when the training starts, because earlier stages may still make them again.
    """
    train = config.folder / "train"
    refused: list[tuple[Path, int, str]] = []  # folder, step and differences, newest first
    for folder in sorted((train / "checkpoints").glob("step_*"), reverse=True):
        try:
            manifest = read_checkpoint_manifest(folder)
        except ManifestError:
            continue  # training uses an older one
        changes = _describe_changes(config, manifest)
        if not changes:
            return ""
        refused.append((folder, manifest["step"], changes))
    if not refused:
        return ""

    folder, step, changes = refused[0]
    has_steps_left = step < config.trainer.steps
    if config.trainer.resume == "changed" and has_steps_left:
        return ""
    more_steps = "" if has_steps_left else f" with trainer.steps above {step}"
    return (
        f"{folder}: trained with {changes}; fork it (trainer.resume=changed{more_steps}), name the run "
        f"anew, or start it over (`rm -r {train}`; docs/checkpoints.md)"
    )


def _describe_changes(config: RunConfig, manifest: Mapping[str, Any]) -> str:
    """Describe how settings and modules of a run differ from those of a checkpoint, or return ""."""
    modules = recipe_module_digests(config)
    identity = Identity(run=config.run, models={}, recipe=recipe_of(config), inputs=modules)
    recipe = {
        key: value for key, value in manifest.get("recipe", {}).items() if key != "data.tasks"
    }
    inputs = manifest.get("inputs", {})
    compared_inputs = {key: inputs.get(key, digest) for key, digest in modules.items()}
    return describe_differences({"recipe": recipe, "inputs": compared_inputs}, identity)
