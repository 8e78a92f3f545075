"""Check that the checkpoints of runs can continue with their settings and inputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.suite import Suite
from mcore_mas.runtime.checkpoint_manifest import (
    ManifestError,
    models_problem,
    read_checkpoint_manifest,
    surplus_steps_problem,
)
from mcore_mas.runtime.input_digests import GAMES_KEY, INDEX_KEY, input_digests, model_key
from mcore_mas.runtime.recipe import (
    CODE_KEY,
    TASKS_KEY,
    Identity,
    architectures_of,
    describe_differences,
    recipe_of,
)
from retrieval.corpus import RetrievalError, copy_corpus
from rollout.base.digests import sha256
from rollout.base.json_files import read_json
from rollout.config.tasks import make_tasks
from rollout.records.files import RecordError, stored_tasks_digest, tasks_digest
from rollout.records.trajectory import Task

# Passages of up to this size are compared before the index is built again.
_MAX_COMPARED_BYTES = 2**24


def recipe_problems(suite: Suite) -> list[str]:
    """Return one line for each run of a suite whose checkpoints training would refuse.

    Settings, code and inputs are compared as the training compares them. Models and indexes that
    the pipeline has yet to make are compared when the training starts.
    """
    lines = []
    new_tasks: dict[str, str] = {}  # digests of training tasks, by the run that will make them
    for run in suite.runs:
        config = suite.run_config(run)
        manifests = _read_manifests(config.folder / "train" / "checkpoints")
        if not manifests:
            continue
        identity = _expected_identity(config, _expected_tasks_digest(suite, config, new_tasks))
        newest = max((config.folder / "train" / "checkpoints").glob("step_*"))  # may be damaged
        newest_step = int(newest.name.removeprefix("step_"))
        has_steps_left = newest_step < config.trainer.steps
        if (config.folder / "train" / "done.json").is_file() and not has_steps_left:
            # A finished training is not repeated because of another version of mcore-mas.
            inputs = {key: value for key, value in identity.inputs.items() if key != CODE_KEY}
            identity = replace(identity, inputs=inputs)
        problem = _checkpoints_problem(config, manifests, identity)
        if problem:
            lines.append(f"run '{run}': {problem}")
    return lines


def checkpoint_mismatch(
    config: RunConfig, train_tasks: Sequence[Task], *, trains: bool = True
) -> str:
    """Return why the checkpoints of a run do not fit its config and these tasks, or "".

    Args:
        config: the run's config, which need not be written yet.
        train_tasks: the run's training tasks, which need not be written yet.
        trains: True if the run is about to be trained. False: only architectures, settings and tasks
            are compared, so code, models and other inputs may have changed.
    """
    manifests = _read_manifests(config.folder / "train" / "checkpoints")
    if not manifests:
        return ""
    identity = _expected_identity(config, tasks_digest(train_tasks))
    if not trains:
        identity = replace(identity, inputs={})
    return _checkpoints_problem(config, manifests, identity)


def _read_manifests(folder: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the manifests of the checkpoints in a folder, newest first, without damaged ones."""
    manifests: dict[Path, Mapping[str, Any]] = {}
    for checkpoint in sorted(folder.glob("step_*"), reverse=True):
        try:
            manifests[checkpoint] = read_checkpoint_manifest(checkpoint)
        except ManifestError:
            continue  # training uses an older one
    return manifests


def _checkpoints_problem(
    config: RunConfig, manifests: Mapping[Path, Mapping[str, Any]], identity: Identity
) -> str:
    """Return why a run cannot continue from its checkpoints, or "" if it can.

    A run continues from its newest checkpoint that fits. A run that may change its settings (a fork)
    begins with the newest one, so older ones are not tried.

    Args:
        config: the run's config.
        manifests: manifests of the checkpoints by folder, newest first; at least one.
        identity: identity that the run will have when its training starts.
    """
    problems = []
    for folder, manifest in manifests.items():
        problem = _checkpoint_problem(config, manifest, identity)
        if not problem:
            return surplus_steps_problem(folder, manifest["step"], config.trainer.steps)
        problems.append(f"{folder}: {problem}")
        if identity.may_change:
            break
    train = config.folder / "train"
    return f"{problems[0]}, or start it over (`rm -r {train}`; docs/checkpoints.md)"


def _checkpoint_problem(config: RunConfig, manifest: Mapping[str, Any], identity: Identity) -> str:
    """Return why a checkpoint cannot be used, and what to do, or ""."""
    problem = models_problem(manifest, identity) if identity.models else ""
    if problem:
        return f"{problem}; name the run anew"

    changes = describe_differences(_comparable_part(manifest, config, identity), identity)
    step = manifest["step"]
    has_steps_left = step < config.trainer.steps
    if not changes or (identity.may_change and has_steps_left):
        return ""
    more_steps = "" if has_steps_left else f" with trainer.steps above {step}"
    return (
        f"trained with {changes}; fork it (trainer.resume=changed{more_steps}), name the run anew"
    )


def _expected_identity(config: RunConfig, expected_tasks_digest: str) -> Identity:
    """Return the identity that a run will have when its training starts, as far as it is known.

    Architectures are left out if the model of a trained policy is yet to be made.

    Args:
        config: the run's config.
        expected_tasks_digest: digest of the training tasks that the run will have; "" if unknown.
    """
    recipe = recipe_of(config)
    if expected_tasks_digest:
        recipe[TASKS_KEY] = expected_tasks_digest

    unmade = _policies_without_model(config)
    inputs = _without_models(input_digests(config), unmade)
    passages_digest = _digest_of_edited_passages(config)
    if passages_digest:
        # The index is yet to be built, so its digest is unknown. The digest of the passages takes
        # its place: it equals no digest of an index, so the index is found to have changed.
        inputs[INDEX_KEY] = passages_digest

    return Identity(
        run=config.run,
        models={} if unmade & set(config.trained) else architectures_of(config),
        recipe=recipe,
        inputs=inputs,
        may_change=config.trainer.resume == "changed",
    )


def _comparable_part(
    manifest: Mapping[str, Any], config: RunConfig, identity: Identity
) -> dict[str, Any]:
    """Return the recipe and the inputs of a checkpoint, without those that are not known now."""
    recipe = dict(manifest.get("recipe", {}))
    inputs = _without_models(manifest.get("inputs", {}), _policies_without_model(config))
    if TASKS_KEY not in identity.recipe:
        recipe.pop(TASKS_KEY, None)
    for key in (CODE_KEY, INDEX_KEY, GAMES_KEY):
        if key not in identity.inputs:
            inputs.pop(key, None)
    return {"recipe": recipe, "inputs": inputs}


def _policies_without_model(config: RunConfig) -> set[str]:
    """Return the policies whose starting models are missing, such as those of a cold start."""
    return {
        policy
        for policy, folder in config.models.items()
        if not Path(folder, "config.json").is_file()
    }


def _without_models(inputs: Mapping[str, str], policies: Iterable[str]) -> dict[str, str]:
    """Return digests of inputs without those of the starting models of some policies."""
    prefixes = tuple(f"{model_key(policy)}/" for policy in policies)
    return {key: digest for key, digest in inputs.items() if not key.startswith(prefixes)}


def _expected_tasks_digest(suite: Suite, config: RunConfig, new_tasks: dict[str, str]) -> str:
    """Return the digest of the training tasks that a run will have, or "" if it is not known.

    This is the digest stored with the run's tasks. If a data file is newer than these, or the user's
    code generates them, the tasks are made again, in memory, to compute the digest.

    Args:
        suite: the suite of the run.
        config: the run's config.
        new_tasks: digests of training tasks that will be made; those of this run are added.
    """
    file = config.folder / "tasks" / "train.parquet"
    digest = stored_tasks_digest(file)
    data = config.data
    if data.generator is None:
        if not all(path.exists() for path in data.paths):
            return digest
        written = file.stat().st_mtime if digest else 0.0
        if all(path.stat().st_mtime <= written for path in data.paths):
            return digest
    elif ":" not in data.generator:
        return digest

    owner = suite.task_owner[config.run]
    if owner not in new_tasks:
        try:
            new_tasks[owner] = tasks_digest(make_tasks(data, config.seed)["train"])
        except (RecordError, ValueError):
            new_tasks[owner] = ""  # the check of the suite's tasks reports it
    return new_tasks[owner]


def _digest_of_edited_passages(config: RunConfig) -> str:
    """Return a digest of a run's passages if they are no longer those of its index, or ""."""
    passages = config.retriever.passages if config.retriever else None
    index = config.folder / "index" / "index.json"
    if passages is None or not passages.is_file() or not index.is_file():
        return ""
    status = passages.stat()
    is_older_than_index = status.st_mtime <= index.stat().st_mtime
    if is_older_than_index or status.st_size > _MAX_COMPARED_BYTES:
        return ""

    # The index has the digest of the pipeline's copy of the passages, so another copy is made here.
    with TemporaryDirectory() as folder:
        corpus = Path(folder, "passages.jsonl")
        try:
            copy_corpus(passages, corpus)
            indexed_digest = read_json(index)["corpus_sha256"]
        except (RetrievalError, OSError, ValueError, LookupError):
            return ""  # the job that copies the passages, or builds the index, reports it
        digest = sha256(corpus)
    return digest if digest != indexed_digest else ""
