"""Identity of an evaluation: a digest of everything that decides the replies of a team."""

import hashlib
import json
from pathlib import Path

from mcore_mas.config.run import RunConfig
from rollout.base.digests import sha256
from rollout.base.ownership import FolderError

# Sections of the config that decide the replies of the team.
_SECTIONS = frozenset({"seed", "env", "orchestra", "agents", "policies", "retriever"})


def evaluation_identity(config: RunConfig) -> str:
    """Return a digest of the test tasks, the settings of an evaluation and the files of its models.

    Of the files, the names, sizes and times of change are taken. The number of samples and the
    deadlines are not part of the digest: an evaluation continues if these change.

    Raises:
        FolderError: a model folder is missing.
    """
    teachers = {"policies": {"__all__": {"teacher"}}}  # teach in trainings only
    settings = config.model_dump(mode="json", include=set(_SECTIONS), exclude=teachers)
    settings["sampling"] = config.evaluation.sampling
    engine = config.engine.model_dump(mode="json", include={"max_length", "overlong_prompts"})
    models = {
        policy: [folder, *_file_stats(Path(folder))] for policy, folder in config.models.items()
    }
    tasks = sha256(config.folder / "tasks" / "test.parquet")
    text = json.dumps([settings, engine, models, tasks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_stats(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and time of the last change in nanoseconds of each file."""
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such model folder; name one that is on this machine")
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
