"""Acquiring an input of a run: fetched, converted, checked, with a receipt; and a report of all with what leaks."""

import gzip
import json
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_mas.pipeline.hub import AcquireError, Hub, fetch
from mcore_mas.pipeline.sources import Source, known_sources
from mcore_mas.reports.pages import render_page
from rollout.base.errors import ModelError
from rollout.base.files import atomic_path, write_json, write_text
from rollout.config.data import DataConfig, make_tasks
from rollout.models.architecture import read_config
from rollout.models.tensors import tensor_shapes
from rollout.records.files import RecordError
from rollout.records.grouping import group_pairs
from rollout.tasks.fields import BadRow
from rollout.tasks.files import FORMATS, problem_task, read_rows
from rollout.tasks.splits import SPLITS, find_leaks, tokenise

_RAW = Path("data/raw")
_BATCH = 256  # rows written together
Drawn = Mapping[
    str, tuple[Mapping[str, Any], int]
]  # what tasks are drawn by: data section and seed of each run


@dataclass(slots=True)
class Rows:
    """What became of the rows of a data file."""

    rows: int = 0  # with the values that the source asks for
    kept: int = 0
    duplicates: int = 0  # of a kept one: the same question and answer, under the same id
    repeated: int = (
        0  # kept, though its question is a kept one's, but for case, spacing and LaTeX's marks
    )
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    def drop(self, reason: str) -> None:
        """Count a row that cannot be used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def acquire(item: str, receipt: Path, hub: Hub) -> None:
    """Have `item`, a path of workflow/sources.yaml, and write where it is from and what it holds to `receipt`.

    What is there already is checked and used as it is.

    Raises:
        AcquireError, RetrievalError: it cannot be had, or is not what its name says.
    """
    source, path = known_sources()[item], Path(item)
    there, fetched, found = path.exists(), dict[str, Any](), dict[str, Any]()
    if source.encoder:
        found = _open_index(source, path)
    elif path.parts[0] == "models":
        folder = path if there else path.with_name(f".{path.name}.partial")
        fetched = {} if there else fetch(source, folder, hub, model=True)
        found = _check_model(folder)
        if not there:  # it is under its name once all its files are
            folder.rename(path)
    else:
        raw = _RAW / str(source.repository).replace("/", "--")
        fetched = {} if there else fetch(source, raw, hub)
        files = [raw / name for name in fetched]
        if source.format:
            found = asdict(_check_data(path, source) if there else convert(files, source, path))
        elif not there:
            assemble(files, path)
        found = {**found, "bytes": path.stat().st_size}
    origin = "was there" if there else source.described
    revision = hub.recorded(str(source.repository)).revision if fetched else None
    write_json(
        receipt, {"item": item, "origin": origin, "revision": revision, "files": fetched, **found}
    )
    print(f"{item}: {origin}, {found}")


def _open_index(source: Source, manifest: Path) -> dict[str, Any]:
    """Make a published index usable, or verify it where it is; its counts."""
    from retrieval.build import import_index
    from retrieval.encoder import Encoder
    from retrieval.index import Index

    vectors, corpus, folder = map(Path, source.needs)
    encoder = Encoder.of(str(source.encoder), folder)
    if manifest.exists():
        made = Index.open(manifest.parent, encoder=encoder.identity).manifest
    else:
        made = import_index(vectors, corpus, encoder)
    return {"bytes": vectors.stat().st_size, "rows": made.ntotal, "kept": made.ntotal}


def _check_model(folder: Path) -> dict[str, Any]:
    """Count tensors and parameters, from headers; see that the folder's files are whole, and its tokenizer there."""
    from transformers import AutoTokenizer

    try:
        kind, shapes = read_config(folder).get("model_type"), tensor_shapes(folder)
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ModelError as error:
        raise AcquireError(f"{error}; remove {folder} to have it fetched") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise AcquireError(
            f"{folder}: its tokenizer cannot be read ({reason}); remove it to have it fetched"
        ) from None
    return {
        "model_type": kind,
        "tensors": len(shapes),
        "parameters": sum(map(prod, shapes.values())),
    }


def convert(raw: Sequence[Path], source: Source, out: Path) -> Rows:
    """Write the rows of `raw` that the source's reader takes as one file `out`, their columns as they are.

    Raises:
        AcquireError: a file cannot be read, there are not as many rows as there should be, or none can be used.
    """
    found = Rows()
    with atomic_path(out) as temporary:
        try:
            types = (
                pq.read_schema(raw[0]) if all(file.suffix == ".parquet" for file in raw) else None
            )
            _write(temporary, out.suffix, _taken(raw, source, found), types)
        except (RecordError, pa.ArrowException) as error:
            raise AcquireError(f"{source.repository}: {error}") from error
        _judge(str(source.repository), source, found)
    return found


def _check_data(path: Path, source: Source) -> Rows:
    found = Rows()
    try:
        for _ in _taken([path], source.model_copy(update={"drawn": None}), found):
            pass
    except RecordError as error:
        raise AcquireError(f"{error}; remove it to have it fetched") from error
    _judge(
        str(path), source.model_copy(update={"rows": None}), found
    )  # it may have been made in another way
    return found


def _judge(where: str, source: Source, found: Rows) -> None:
    if source.rows not in (None, found.rows):
        raise AcquireError(
            f"{where}: {found.rows} rows, expected {source.rows}; see revision and rows in sources.yaml"
        )
    if not found.kept:
        reasons = ", ".join(found.dropped) or "it has none"
        raise AcquireError(
            f"{where}: no row of format {source.format} ({reasons}); see its columns and sources.yaml"
        )


def _taken(files: Sequence[Path], source: Source, found: Rows) -> Iterator[Mapping[str, Any]]:
    """The rows that a team can be asked, each once; `found` learns what became of all."""
    reader, drawn = FORMATS[str(source.format)], None
    if (
        source.drawn is not None
    ):  # of the rows the authors take some, whom they draw with numpy's older generator
        number, seed = source.drawn
        drawn = set(
            np.random.RandomState(seed).choice(source.rows or 0, number, replace=False).tolist()
        )
    known: dict[str, int] = {}  # id -> hash of what it asks and accepts
    texts: set[str] = set()
    for row in (row for file in files for row in read_rows(file)):
        if any(str(row.get(column)) != value for column, value in source.where.items()):
            continue
        found.rows += 1
        if drawn is not None and found.rows - 1 not in drawn:
            found.drop("is not drawn")
            continue
        try:
            problem = reader.problem(row)
        except BadRow as error:
            found.drop(re.split(r":| \(", str(error))[0])
            continue
        if problem is None:
            found.drop("has nothing to score")
            continue
        task = problem_task(problem, reader.env, "test", problem.source)
        asked = hash((task.prompt, task.answers))
        if known.setdefault(task.id, asked) != asked:
            found.drop("asks what another row asks, with another answer")
        elif len(known) == found.kept:
            found.duplicates += 1
        else:
            text = " ".join(tokenise(task))
            found.repeated += text in texts
            found.kept += 1
            texts.add(text)
            yield row


def _write(
    path: Path, suffix: str, rows: Iterator[Mapping[str, Any]], schema: pa.Schema | None
) -> None:
    if suffix == ".json":
        write_json(path, list(rows))
        return
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in rows)
        return
    if schema is None:
        taken = list(rows)
        schema, rows = pa.Table.from_pylist(taken).schema, iter(taken)
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def assemble(parts: Sequence[Path], out: Path) -> None:
    """Join `parts` as one file `out`, unpacked where they are .gz, and the parts are gone; of a tar its only file.

    Raises:
        AcquireError: an archive is damaged, or has several files.
    """
    with atomic_path(out) as temporary, temporary.open("wb") as target:
        for part in parts:
            try:
                with gzip.open(part) if part.suffix == ".gz" else part.open("rb") as stream:
                    _append(stream, target, part)
            except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
                raise AcquireError(
                    f"{part}: damaged ({error}); remove it to have it fetched again"
                ) from error
    for part in parts:
        part.unlink()


def _append(stream: Any, target: IO[bytes], part: Path) -> None:
    if stream.peek(262)[257:262] != b"ustar":
        shutil.copyfileobj(stream, target, 1 << 24)
        return
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        files = 0
        for member in archive:
            content = archive.extractfile(member)
            files += content is not None
            if files > 1:
                raise AcquireError(f"{part}: an archive of several files; expected one")
            if content is not None:
                shutil.copyfileobj(content, target, 1 << 24)


def report_inputs(
    receipts: Sequence[Path], runs: Drawn, out: Path, *, by_hand: Sequence[str] = ()
) -> None:
    """Write a page on what was acquired: origin, rows and why some were dropped, and what leaks between splits.

    Args:
        runs: all of a suite.
        by_hand: lines on what is missing and can only be put there by hand.

    Raises:
        AcquireError: something has to be put there by hand.
    """
    if by_hand:
        raise AcquireError(
            f"all else is there; put these there by hand, and start it again: {'; '.join(by_hand)}"
        )
    found = [json.loads(path.read_text(encoding="utf-8")) for path in receipts]
    sizes = [
        own.get("bytes") or sum(file["bytes"] for file in own["files"].values()) or ""
        for own in found
    ]
    write_text(
        out,
        render_page(
            "inputs.md.jinja", found=list(zip(found, sizes, strict=True)), leaks=_leaks(runs)
        ),
    )


def _leaks(runs: Drawn) -> list[str]:
    read = {run: drawn for run, drawn in runs.items() if not drawn[0].get("generator")}
    names = group_pairs(
        (json.dumps(drawn, sort_keys=True, default=str), run) for run, drawn in read.items()
    )
    lines = []
    for key, alike in names.items():
        data, seed = json.loads(key)
        tasks = make_tasks(DataConfig.model_validate(data), seed)
        for leak in find_leaks({split: tasks[split] for split in SPLITS}, threshold=None):
            if leak.matches and leak.kind != "tests":
                more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
                count = f"{len(leak.matches)} of {leak.tasks} {leak.split}"
                lines.append(
                    f"{alike[0]}{more}: {count} tasks are in {leak.earlier}, by {leak.kind}"
                )
    return lines
