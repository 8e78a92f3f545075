"""Tasks, and the passages they are about, on disk."""

from __future__ import annotations

from pathlib import Path

from mcore_mas.config import RunConfig
from retrieval.corpus import Passage, write_corpus
from rollout.records import read_tasks, write_tasks
from rollout.registry import lookup
from rollout.tasks import GENERATORS

SPLITS = ("train", "validation", "test")


def prepare_tasks(config_path: Path, out_dir: Path) -> None:
    """Write `out_dir`/{train,validation,test}.parquet, and passages.jsonl where the tasks have passages.

    Raises:
        RecordError: a configured file of tasks cannot be read.
        ValueError: the generator cannot make so many different tasks.
    """
    config = RunConfig.load(config_path)
    data = config.data
    if data.generator is None:
        for split in SPLITS:
            write_tasks(out_dir / f"{split}.parquet", read_tasks(getattr(data, split)))
        return
    generator = lookup("task generator", data.generator, GENERATORS)
    tasks = generator.tasks(config.seed, {split: getattr(data, split) for split in SPLITS})
    for split in SPLITS:
        write_tasks(out_dir / f"{split}.parquet", [task for task in tasks if task.split == split])
    if generator.passages is not None:
        entries = enumerate(generator.passages(config.seed))
        write_corpus(out_dir / "passages.jsonl", (Passage.compose(str(i), e.title, e.text) for i, e in entries))
