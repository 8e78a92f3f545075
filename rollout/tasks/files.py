"""Datasets (data files) as tasks: their rows, their published formats; and data sets as Hugging Face has them."""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
import yaml
from pydantic import TypeAdapter

from rollout.base.json_files import read_json
from rollout.base.lookup import lookup
from rollout.base.parquet import bounded_batches
from rollout.base.yaml_files import read_yaml
from rollout.records.files import RecordError, read_tasks
from rollout.records.trajectory import Task
from rollout.tasks.fields import BadRow, Fields, Format, Problem
from rollout.tasks.programs import STYLES, Programs, swe_bench, tested

_FIELDS = TypeAdapter(dict[str, Fields]).validate_python(
    read_yaml(Path(__file__).with_name("formats.yaml"))
)
PLAIN = _FIELDS["plain"]
FORMATS: dict[str, Format] = {
    **_FIELDS,
    "swe_bench": Programs(read=swe_bench, env="repository", none="is no instance of SWE-bench"),
    **{name: Programs(read=partial(tested, read)) for name, read in STYLES.items()},
}

_BATCH_ROWS = 256
_MAX_CELL_CHARS = 1 << 24
_MOST_JSON, _MOST_LINE = (
    2 << 30,
    64 << 20,
)  # bytes of a file that is read whole, characters of a line


def read_rows(path: Path, suffix: str = "") -> Iterator[Mapping[str, Any]]:
    """The rows of `path` in their order, read as they are asked for, as a file named `suffix` if that is given.

    Raises:
        RecordError: the file is missing, is not what its name says, or holds something that is no row.
    """
    suffix = suffix or path.suffix
    if suffix not in READERS:
        raise RecordError(f"{path}: expected a file named {', '.join(READERS)}")
    try:
        for number, row in enumerate(READERS[suffix](path)):
            if not isinstance(row, Mapping):
                raise RecordError(
                    f"{path}: row {number} is a {type(row).__name__}; expected an object with columns"
                )
            yield row
    except FileNotFoundError as error:
        raise RecordError(f"{path}: no such file") from error
    except RecordError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise RecordError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in bounded_batches(file, rows=_BATCH_ROWS):
            yield from batch.to_pylist()


def _json(path: Path) -> Iterator[Any]:
    value = read_json(path, _MOST_JSON)
    if isinstance(value, Mapping):
        value = next(
            (value[key] for key in ("data", "Data") if isinstance(value.get(key), list)), value
        )
    if not isinstance(value, list):
        raise RecordError(f"{path}: expected a list of rows, or an object with one under 'data'")
    yield from value


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(
        encoding="utf-8-sig"
    ) as lines:  # programs on Windows write a mark at the beginning
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_LINE + 1), ""), start=1):
            if len(line) > _MOST_LINE:
                raise RecordError(f"{path}: line {number} has more than {_MOST_LINE} characters")
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise RecordError(f"{path}: line {number} cannot be read ({error})") from error


def _csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        while True:
            usual = csv.field_size_limit(
                _MAX_CELL_CHARS
            )  # cells may be longer than this process allows elsewhere
            try:
                row = next(rows, None)
            finally:
                csv.field_size_limit(usual)
            if row is None:
                return
            yield row


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
}

OWN = "tasks"  # the format of `rollout.records.files.write_tasks`
READABLE: dict[str, Format | None] = {OWN: None, **FORMATS}

_COLUMNS = {
    "prompt": "question",
    "answer": "answers",
    "id": "name",
    "source": "source",
    "context": "context",
}
Placed = tuple[str, Task]  # where a task is from, "file: row 7"


def read_task_file(
    path: Path,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    format: str,
    split: str,
    source: str = "",
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Placed]:
    """The tasks of a file with the rows they are from, counted from 0; rows with nothing to score are left out.

    A task's id is its source, the row's own id if there is one, and a digest of the question. Files of the format
    `tasks` bring ids, sources and splits of their own.

    Args:
        rows: what is there; None: the file is read.
        format: a name in READABLE, or the import path of a Format.
        split: train, validation or test.
        source: the data source to report under; "" is the row's own, or the format's name.
        columns: where a row has its prompt, answer, id, source or context, in place of the format's columns.

    Raises:
        RecordError: the file or a row of it is not of that format: says which, and what was expected.
        UnknownName: no such format.
    """
    if rows is None and lookup("data format", format, READABLE) is None:
        for number, task in enumerate(read_tasks(path)):
            yield f"{path}: row {number}", task
        return
    known = lookup("data format", format, FORMATS)
    if columns:
        if not isinstance(known, Fields):
            raise RecordError(
                f"{path}: rows of format {format} are programs with tests; leave columns out"
            )
        own: dict[str, Any] = {_COLUMNS[what]: (name.lower(),) for what, name in columns.items()}
        known = replace(known, **own)
    for number, row in enumerate(read_rows(path) if rows is None else rows):
        try:
            problem = known.problem(row)
        except BadRow as error:
            raise RecordError(f"{path}: row {number} of format {format} {error}") from error
        if problem is not None:
            label = source or problem.source or format.rpartition(":")[2]
            yield f"{path}: row {number}", problem_task(problem, known.env, split, label)


def distinct(placed: Iterable[Placed], seen: dict[str, Placed], *, drop: bool) -> Iterator[Task]:
    """Tasks whose ids are not in `seen`, which learns them; with `drop` the same task again is passed over.

    Raises:
        RecordError: an id comes again, and either `drop` is off or the task is another one.
    """
    for place, task in placed:
        if task.id not in seen:
            seen[task.id] = (place, task)
            yield task
            continue
        first, same = seen[task.id]
        if (same.prompt, same.answers) != (task.prompt, task.answers):
            raise RecordError(
                f"{place}: task {task.id} is in {first} with another prompt or answer; keep one of them"
            )
        elif not drop:
            raise RecordError(
                f"{place}: task {task.id} is in {first} already; set data.duplicates: drop to keep one"
            )


def problem_task(problem: Problem, env: str, split: str, source: str) -> Task:
    """The task of a row's problem, whose id is its source, the row's own id and a digest of the question."""
    digest = hashlib.blake2b(
        problem.question.encode(errors="surrogatepass"), digest_size=6
    ).hexdigest()
    name = f"{problem.name}-{digest}" if problem.name else digest
    return Task(
        id=f"{source}/{name}",
        prompt=problem.prompt,
        answers=problem.answers,
        env=env,
        source=source,
        split=split,
    )


_ALSO = {
    "validation": ("valid", "val", "dev"),
    "train": ("training",),
    "test": ("testing", "eval", "evaluation"),
}


def located_dataset(path: str) -> str:
    """`path` itself; of a hub's id that was downloaded (`hf download --repo-type dataset ID`) its folder."""
    path = str(Path(path).expanduser()) if path.startswith("~/") else path
    if (
        Path(path).exists()
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", path)
        or path.endswith(tuple(READERS))
    ):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return path


def not_downloaded(path: str) -> str:
    """What to do about a data file or data set that is not there."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.endswith(tuple(READERS)):
        return f"nor is it in the hub's cache on this machine: `hf download --repo-type dataset {path}`, or name a file"
    return "name another one"


def dataset_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """The files of a split in a data set's folder: those that its card names, else those that are called so.

    Raises:
        RecordError: there are none, or the folder has several subsets and `subset` names none of them.
    """
    card = _card(folder)
    if card:
        if subset is None and len(card) > 1:
            card = [one for one in card if one.get("default")] or card
        chosen = [one for one in card if subset in (None, one.get("config_name", "default"))]
        if len(chosen) != 1:
            names = ", ".join(one.get("config_name", "default") for one in card)
            raise RecordError(f"{folder}: subset {subset}; expected one of {names}")
        patterns = _by_split(chosen[0]["data_files"])
        inside = [
            one for one in patterns.get(split, ()) if ".." not in one and not one.startswith("/")
        ]
        found = [file for pattern in inside for file in sorted(folder.glob(pattern))]
        there: Iterable[str] = patterns
    else:
        below = folder / subset if subset else folder
        files = sorted(file for file in below.rglob("*") if file.suffix in READERS)
        words = "|".join((split, *_ALSO.get(split, ())))
        called = re.compile(rf"(?<![a-zA-Z0-9])({words})(?![a-zA-Z0-9])")
        found = [file for file in files if called.search(file.relative_to(below).as_posix())]
        there = [file.relative_to(folder).as_posix() for file in files[:9]]
    if not found:
        raise RecordError(
            f"{folder}: no files of split {split}; there are {', '.join(there) or 'none'}"
        )
    return found


def _card(folder: Path) -> list[dict[str, Any]]:
    """The subsets of a data set's card, README.md, that name their files."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    try:
        values = (metadata_load(card) if card.is_file() else None) or {}
        return [one for one in values.get("configs", ()) if one.get("data_files")]
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RecordError(
            f"{card}: its head cannot be read ({str(error).splitlines()[0]})"
        ) from error


def _by_split(named: Any) -> Mapping[str, list[str]]:
    """Patterns of files by split; what names none is of train."""
    if isinstance(named, Mapping):
        named = [{"split": split, "path": path} for split, path in named.items()]
    if isinstance(named, str) or (
        isinstance(named, list) and all(isinstance(one, str) for one in named)
    ):
        return {"train": [named] if isinstance(named, str) else named}
    return {
        one["split"]: [one["path"]] if isinstance(one["path"], str) else one["path"]
        for one in named
    }
