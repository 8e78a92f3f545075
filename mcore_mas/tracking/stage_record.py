"""Records of the stages of a run, from which `publish` makes MLflow's runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_mas.tracking.run_tags import merge_tags, process_tags
from rollout.base.json_files import read_json, write_json


@contextmanager
def stage_record(log: Path | str) -> Iterator[None]:
    """Record times, machines and Slurm jobs of the stage in this block, in a JSON file next to its log.

    If the stage was interrupted before, its record is continued: `began` stays that of the first
    attempt, and the tags name all Slurm jobs.
    """
    path = Path(log).with_suffix(".json")
    earlier = read_json(path) if path.is_file() else {}
    record = {"began": time.time(), "tags": process_tags()}
    if earlier and "ended" not in earlier:
        record = {
            "began": earlier["began"],
            "tags": merge_tags(earlier["tags"], process_tags()),
        }
    write_json(path, record)
    yield
    write_json(path, {**record, "ended": time.time()})
