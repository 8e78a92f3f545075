"""Task preparation: the tasks and passages of a run, and small stand-ins for published files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.check import answer_problems
from retrieval.corpus import copy_corpus, write_corpus
from rollout.base.lookup import lookup
from rollout.config.tasks import make_tasks
from rollout.records.files import RecordError, write_tasks
from rollout.records.trajectory import Task
from rollout.tasks.encyclopedia_world import passages as encyclopedia_passages
from rollout.tasks.generators import GENERATORS
from rollout.tasks.tiny_files import write_tiny_file

_TINY_PASSAGES = 80  # number of passages at the scale `tiny`


def prepare_tasks(config_path: Path, out_dir: Path) -> None:
    """Write the tasks of each split, and the passages that the team searches.

    See `write_prepared`.

    Raises:
        RecordError: the tasks of the configured files cannot be used (see `make_tasks`), or the
            environment compares replies with answers and a task has none.
        ValueError: the tasks of the generator cannot be used (see `make_tasks`).
        RetrievalError: the file of passages cannot be used.
    """
    config = RunConfig.load(config_path)
    tasks = make_tasks(config.data, config.seed)
    check_answers(config, tasks)
    write_prepared(config, tasks, out_dir)


def check_answers(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> None:
    """Raise RecordError if the environment compares replies with answers and a task has none."""
    for split_tasks in tasks.values():
        problems = list(answer_problems(config.env.name, split_tasks))
        if problems:
            raise RecordError(problems[0])


def write_prepared(config: RunConfig, tasks: Mapping[str, Sequence[Task]], out_dir: Path) -> None:
    """Write tasks by split, and the passages that the team searches.

    Tasks go to `out_dir`/{split}.parquet. Passages go to `out_dir`/passages.jsonl if the config
    names a file of passages or the generator makes some.

    Raises:
        RetrievalError: the file of passages cannot be used.
    """
    for split, split_tasks in tasks.items():
        write_tasks(out_dir / f"{split}.parquet", split_tasks)

    passages_path = out_dir / "passages.jsonl"
    if config.retriever is not None and config.retriever.passages is not None:
        copy_corpus(config.retriever.passages, passages_path)
    elif config.data.generator is not None:
        generator = lookup("task generator", config.data.generator, GENERATORS)
        if generator.passages is not None:
            write_corpus(passages_path, generator.passages(config.seed))


def make_tiny_file(path: Path, format: str) -> None:
    """Write a small file that stands for a published one at the scale `tiny`.

    Args:
        path: the file.
        format: format of its rows, or "passages".
    """
    if format == "passages":
        write_corpus(path, encyclopedia_passages(1)[:_TINY_PASSAGES])
    else:
        write_tiny_file(path, format)
