"""Reproduction bundles: a table of results and all records behind it in one zip file.

`make_bundle` writes the table, its evaluations, the configs and metrics of the runs, and the
digests of their inputs and of the code, described as an RO-Crate 1.1. `verify_bundle` checks a
bundle and recomputes its table from the scores of the tasks.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any
from urllib.parse import unquote

import yaml

from mcore_mas import PACKAGES, SHIPPED, code_commit
from mcore_mas.equations.statistics import pass_at
from mcore_mas.reports.paper_results import Provenance, make_paper_table
from mcore_mas.reports.paper_tables import PaperTable, tables_in_folder
from retrieval.regular_files import open_regular
from rollout.base.digests import sha256
from rollout.base.files import atomic_path
from rollout.base.json_files import read_json
from rollout.base.yaml_files import read_yaml
from rollout.config.data import DataConfig

METADATA = "ro-crate-metadata.json"
_TABLE_FILES = ("table.csv", "table.md")
_TOLERANCE = (
    "ours agrees with the paper's number where the column `within` of table.csv is True: they differ "
    "by at most `tolerance`. This is the sum of half a unit of the paper's last digit and of the "
    "distance from our number to one end of our 95 % interval over tasks: the end towards the paper's "
    "number"
)
_LICENCE = "https://spdx.org/licenses/Apache-2.0"
_MEDIA_TYPES = {
    ".csv": "text/csv",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".txt": "text/plain",
    ".yaml": "application/yaml",
}
# Time stamp of every member. The time at which a bundle was made is in its description.
_MEMBER_TIME = (1980, 1, 1, 0, 0, 0)
# Limit for the size of all members unpacked, several times that of the bundle of the largest table.
_MAX_BYTES = 4 << 30
_SHIPPED_FOLDERS = ("configs", "workflow")  # folders beside the packages whose files are code too


class BundleError(RuntimeError):
    """A bundle is invalid; the message names the file in it and the mistake."""


def make_bundle(record_file: Path, out: Path) -> None:
    """Write the bundle of a table.

    Args:
        record_file: results/tables/{table}.json, the record of the table's evaluations, scale, seeds
            and commits. The table is in the same folder.
        out: zip file to write.
    """
    record = read_json(record_file)
    results = record_file.parent.parent
    evaluations = [Path(path) for paths in record["evaluations"].values() for path in paths]
    runs = sorted({file.parent.parent for file in evaluations})

    record["evaluations"] = {
        key: [_member_name(Path(path), results) for path in paths]
        for key, paths in record["evaluations"].items()
    }
    record["tolerance"] = _TOLERANCE
    _, definition = tables_in_folder()[record["table"]]
    members = {
        "table.csv": record_file.with_suffix(".csv").read_bytes(),
        "table.md": record_file.with_suffix(".md").read_bytes(),
        "table.yaml": yaml.safe_dump({"table": definition}, sort_keys=False, encoding="utf-8"),
        "made.json": _json_bytes(record),
        "inputs.json": _json_bytes({"code": _code_identity(), "files": _input_files(runs)}),
        "environment.json": _json_bytes(_environment()),
    }
    for file in [*evaluations, *_run_files(runs)]:
        members[_member_name(file, results)] = file.read_bytes()
    lock = SHIPPED / "requirements" / _lock_name()
    if lock.is_file():
        members["requirements.txt"] = lock.read_bytes()
    members = dict(sorted(members.items()))
    members[METADATA] = _crate_metadata(PaperTable.load(record["table"]), members)

    with (
        atomic_path(out) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, _MEMBER_TIME), content, zipfile.ZIP_DEFLATED)


def verify_bundle(path: Path) -> str:
    """Check all digests of a bundle, and recompute its table from the scores of the tasks.

    The check needs no other file. It does not prove who made the bundle.

    Returns:
        One line with the number of checked files and evaluations.

    Raises:
        BundleError: a file in the bundle is missing, altered or inconsistent.
    """
    if not path.is_file():
        raise BundleError(f"{path}: no such file; expected results/tables/TABLE.bundle.zip")
    try:
        members = _read_members(path)
        with tempfile.TemporaryDirectory() as folder:
            summary = _check_table(path, members, Path(folder))
    except BundleError:
        raise
    # A malicious bundle can make any reader fail, so all errors of readers are reported as damage.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BundleError(f"{path}: damaged, or no bundle of a table ({reason})") from error
    return f"{path}: {len(members)} files as described; {summary}"


def _read_members(path: Path) -> dict[str, bytes]:
    """Return all files of a bundle except its description, after checking digests and sizes."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > _MAX_BYTES:
            raise BundleError(
                f"{path}: {size / 1e9:.1f} GB unpacked, and a bundle has at most "
                f"{_MAX_BYTES / 1e9:.1f} GB"
            )
        members = {info.filename: archive.read(info) for info in archive.infolist()}

    graph = json.loads(members.pop(METADATA))["@graph"]
    described = {unquote(entity["@id"]): entity for entity in graph if entity["@type"] == "File"}
    for name in described.keys() - members.keys():
        raise BundleError(f"{path}, {name}: missing")
    for name in members.keys() - described.keys():
        raise BundleError(f"{path}, {name}: not listed in {METADATA}")

    for name, content in members.items():
        digest = hashlib.sha256(content).hexdigest()
        entity = described[name]
        if digest != entity.get("sha256"):
            raise BundleError(
                f"{path}, {name}: sha256 is {digest}, and {METADATA} says {entity.get('sha256')}"
            )
        if str(len(content)) != entity.get("contentSize"):
            raise BundleError(
                f"{path}, {name}: has {len(content)} bytes, and {METADATA} says "
                f"{entity.get('contentSize')}"
            )
    return members


def _check_table(path: Path, members: Mapping[str, bytes], folder: Path) -> str:
    """Recompute the table in a temporary folder and compare it; return a summary."""
    for name, content in members.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}, {name}: leads out of the bundle's folder")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    record = json.loads(members["made.json"])
    for names in record["evaluations"].values():
        for name in names:
            _check_metrics(f"{path}, {name}", json.loads(members[name]))

    files = {key: [folder / name for name in names] for key, names in record["evaluations"].items()}
    provenance = Provenance(**{field.name: record[field.name] for field in fields(Provenance)})
    csv_file = folder / "again.csv"
    markdown_file = folder / "again.md"
    table = PaperTable.load("table", folder)
    make_paper_table(table, files, provenance, csv_file, markdown_file)

    for name, file in zip(_TABLE_FILES, (csv_file, markdown_file), strict=True):
        recomputed = file.read_text(encoding="utf-8").splitlines()
        stated = members[name].decode().splitlines()
        lines = zip_longest(recomputed, stated, fillvalue="")
        for number, (recomputed_line, stated_line) in enumerate(lines, start=1):
            if recomputed_line != stated_line:
                raise BundleError(
                    f"{path}, {name}, line {number}: its scores give '{recomputed_line}', "
                    f"and it says '{stated_line}'"
                )
    return (
        f"the table of {len(files)} evaluations is what their per-task scores give "
        f"(commit {provenance.commit})"
    )


def _check_metrics(where: str, evaluation: Mapping[str, Any]) -> None:
    """Raise a BundleError if the metrics of a task do not follow from its scores.

    maj@k is not checked, because it depends on the answers, which are not in a bundle.
    """
    k = evaluation["k"]
    for task in evaluation["tasks"]:
        scores = [score for score in task["scores"] if score is not None]
        if not scores:
            continue
        expected = {
            f"avg@{k}": fmean(scores),
            f"pass@{k}": pass_at(scores, min(k, len(scores))),
        }
        for metric, value in expected.items():
            stated = task["metrics"][metric]
            if abs(stated - value) > 1e-9:
                raise BundleError(
                    f"{where}: task '{task['task_id']}' says {metric} {stated:g}; "
                    f"its scores give {value:g}"
                )


def _member_name(path: Path, results: Path) -> str:
    return f"runs/{path.relative_to(results).as_posix()}"


def _json_bytes(value: Any) -> bytes:
    return f"{json.dumps(value, indent=1, ensure_ascii=False)}\n".encode()


def _lock_name() -> str:
    return "lock-3.12.txt" if sys.version_info >= (3, 12) else "lock.txt"


def _crate_metadata(table: PaperTable, members: Mapping[str, bytes]) -> bytes:
    """Return the JSON-LD description of all members and of the command that made the table."""
    from rocrate.model import ContextEntity
    from rocrate.rocrate import ROCrate

    crate = ROCrate(version="1.1")
    crate.metadata.extra_terms["sha256"] = "http://schema.org/sha256"

    def add_entity(identifier: str, entity_type: str, **properties: str) -> Any:
        return crate.add(
            ContextEntity(crate, identifier, properties={"@type": entity_type, **properties})
        )

    crate.name = f"{table.title}, reproduced"
    crate.description = f"Our scores beside those of {table.source}: {_TOLERANCE}."
    crate.license = add_entity(_LICENCE, "CreativeWork", name="Apache License 2.0")
    crate.root_dataset["citation"] = add_entity("#paper", "ScholarlyArticle", name=table.source)

    for name, content in members.items():
        properties = {
            "name": name,
            "encodingFormat": _MEDIA_TYPES[PurePosixPath(name).suffix],
            "contentSize": str(len(content)),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        crate.add_file(dest_path=name, properties=properties)
    table_files = [crate.get(name) for name in _TABLE_FILES]
    version = importlib.metadata.version("mcore-mas")
    crate.root_dataset["mentions"] = crate.add_action(
        add_entity("#mcore-mas", "SoftwareApplication", name="mcore-mas", softwareVersion=version),
        identifier="#making",
        object=[entity for entity in crate.data_entities if entity not in table_files],
        result=table_files,
        properties={
            "name": f"snakemake table_{table.name}",
            "endTime": crate.root_dataset["datePublished"],
        },
    )
    return _json_bytes(crate.metadata.generate())


def _run_files(runs: Sequence[Path]) -> list[Path]:
    """Return the existing configs, metrics and training records of the runs."""
    names = ("config.yaml", "train/metrics.jsonl", "train/done.json")
    files = [run / name for run in runs for name in names]
    return [file for file in files if file.is_file()]


def _input_files(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return path, size and digest of the data, models, encoders, tasks and indexes of the runs."""
    paths: set[Path] = set()
    for run in runs:
        config = read_yaml(run / "config.yaml")
        paths.update(DataConfig.model_validate(config["data"]).paths)
        retriever = config.get("retriever") or {}
        if retriever.get("passages"):
            paths.add(Path(retriever["passages"]))

        folders = [run / "tasks", run / "index"]
        folders += [
            Path(policy["model"]) for policy in config["policies"].values() if policy["model"]
        ]
        folders += [
            Path(retriever[key]) for key in ("folder", "encoder_folder") if retriever.get(key)
        ]
        for folder in folders:
            paths.update(folder.rglob("*"))

    files = sorted(path for path in paths if path.is_file())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(sha256, files))
    return [
        {"path": file.as_posix(), "bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    ]


def _code_identity() -> dict[str, str]:
    """Return the commit of the running code, and one digest over its files, templates included.

    The commit of the code that made the table may be another one; it is in made.json.
    """
    package_root = Path(__file__).resolve().parents[2]
    folders = [(package_root, name) for name in PACKAGES]
    folders += [(SHIPPED, name) for name in _SHIPPED_FOLDERS]

    lines = []
    for parent, name in folders:
        for file in sorted((parent / name).rglob("*")):
            is_compiled = file.parent.name == "__pycache__"
            if file.is_file() and not is_compiled:
                lines.append(f"{sha256(file)}  {file.relative_to(parent)}\n")
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"commit": code_commit(), "sha256": digest, "files": str(len(lines))}


def _environment() -> dict[str, Any]:
    """Return a description of this machine; those of the runs' machines are in done.json."""
    packages = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
    }
