"""Tags of MLflow's runs: what they were made from, and by which code, machines and Slurm jobs."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mcore_mas import code_commit
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.slurm import job_machines, slurm_job_id
from rollout.base.digests import sha256
from rollout.records.files import read_tasks, tasks_digest

_LISTS = ("slurm_job", "machines")  # tags with several values, separated by blanks


def config_tags(config: RunConfig, config_path: Path, splits: Iterable[str]) -> dict[str, str]:
    """Return a config's tags: names, seed, models, and digests of the config and its data."""
    tags = {
        **config.tracking.tags,
        "run": config.run,
        "seed": str(config.seed),
        "results": str(config.results),
        "config_sha256": sha256(config_path),
    }
    for policy, model in config.models.items():
        tags[f"model.{policy}"] = str(model)
    for split in splits:
        file = config.folder / "tasks" / f"{split}.parquet"
        if file.is_file():
            tags[f"data.{split}"] = tasks_digest(read_tasks(file))
    return tags


def process_tags() -> dict[str, str]:
    """Return the tags of this process: commit, machines, and the Slurm job if there is one."""
    tags = {"commit": code_commit(), "machines": job_machines()}
    job = slurm_job_id()
    if job:
        tags["slurm_job"] = job
    return tags


def merge_tags(earlier: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return the current tags, with earlier jobs and machines before the current ones."""
    merged = dict(current)
    for name in _LISTS:
        values = [*earlier.get(name, "").split(), *current.get(name, "").split()]
        if values:
            merged[name] = " ".join(dict.fromkeys(values))
    return merged
