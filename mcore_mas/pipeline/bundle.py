"""Reproduction bundle: a table with all that it was made of, as an RO-Crate 1.1 in a zip, and its verification."""

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
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

import yaml

from mcore_mas import PACKAGES, SHIPPED, code_commit
from mcore_mas.equations.statistics import pass_at
from mcore_mas.reports.pages import render_page
from mcore_mas.reports.paper_results import MadeFrom, make_paper_table
from mcore_mas.reports.paper_tables import PaperTable, tables_of
from rollout.base.files import atomic_path, read_yaml, sha256
from rollout.config.data import DataConfig

METADATA = "ro-crate-metadata.json"
_TOLERANCE = (
    "ours agrees with the paper's number where the column `within` of table.csv is True: the distance is no larger "
    "than `tolerance`, the part of our 95 % interval over tasks on that side and half a digit of the paper's rounding"
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal contents are equal files
_MOST = (
    4 << 30
)  # bytes of all members: several times those of the largest table, by its number of tasks
_CODE = (*PACKAGES, "configs", "workflow")


class BundleError(RuntimeError):
    """A bundle is not what it says: one line with the file in it, and what is wrong."""


def make_bundle(made: Path, out: Path) -> None:
    """Write the bundle of a table as `out`; `made` is results/tables/{table}.json, beside the table itself."""
    told = json.loads(made.read_text(encoding="utf-8"))
    results = made.parent.parent
    members: dict[str, Path | bytes] = {
        "table.csv": made.with_suffix(".csv"),
        "table.md": made.with_suffix(".md"),
        "table.yaml": yaml.safe_dump(
            {"table": tables_of()[told["table"]][1]}, sort_keys=False, encoding="utf-8"
        ),
    }
    evaluations = {
        key: [_name(Path(path), results) for path in paths]
        for key, paths in told["evaluations"].items()
    }
    for paths in told["evaluations"].values():
        members |= {_name(Path(path), results): Path(path) for path in paths}
    runs = sorted(
        {Path(path).parent.parent for paths in told["evaluations"].values() for path in paths}
    )
    for run in runs:
        files = [run / "config.yaml", run / "train" / "metrics.jsonl", run / "train" / "done.json"]
        members |= {_name(file, results): file for file in files if file.is_file()}
    members["made.json"] = _json(told | {"evaluations": evaluations, "tolerance": _TOLERANCE})
    members["inputs.json"] = _json({"code": _code(), "files": _inputs(runs)})
    members["environment.json"] = _json(_environment())
    of_python = "lock-3.12.txt" if sys.version_info >= (3, 12) else "lock.txt"
    if (lock := SHIPPED / "requirements" / of_python).is_file():
        members["requirements.txt"] = lock
    contents = {
        n: own if isinstance(own, bytes) else own.read_bytes() for n, own in sorted(members.items())
    }
    contents[METADATA] = _crate(PaperTable.load(told["table"]), contents)
    with (
        atomic_path(out) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)


def verify_bundle(path: Path) -> str:
    """Check every digest of a bundle, and that its table is what its per-task scores give; says so in a line.

    Needs nothing but the file: neither the results nor the folder that it was made in. It cannot tell who made it.

    Raises:
        BundleError: what is wrong with which file in it.
    """
    try:
        contents = _members(path)
        with tempfile.TemporaryDirectory() as folder:
            return f"{path}: {len(contents)} files as described; {_recomputed(path, contents, Path(folder))}"
    except BundleError:
        raise
    except (
        Exception
    ) as error:  # whatever the readers of what somebody may have made on purpose raise
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BundleError(f"{path}: damaged, or no bundle of a table ({why})") from error


def _members(path: Path) -> dict[str, bytes]:
    """What is in a bundle besides its description, which has the digest of each."""
    with zipfile.ZipFile(path) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if (
            size > _MOST
        ):  # it would fill the memory; of a member no more is read than it says to have
            most = f"{_MOST / 1e9:.1f} GB"
            raise BundleError(
                f"{path}: {size / 1e9:.1f} GB unpacked, and a bundle has at most {most}"
            )
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    described = {entity["@id"]: entity for entity in json.loads(contents.pop(METADATA))["@graph"]}
    listed = {name: entity for name, entity in described.items() if entity["@type"] == "File"}
    for name in listed.keys() ^ contents.keys():
        raise BundleError(
            f"{path}, {name}: {'missing' if name in listed else f'not listed in {METADATA}'}"
        )
    for name, content in contents.items():
        found = hashlib.sha256(content).hexdigest()
        if found != listed[name].get("sha256") or str(len(content)) != listed[name].get(
            "contentSize"
        ):
            raise BundleError(
                f"{path}, {name}: sha256 is {found}, and {METADATA} says {listed[name].get('sha256')}"
            )
    return contents


def _recomputed(path: Path, contents: Mapping[str, bytes], folder: Path) -> str:
    """Make the table again from the scores, and compare."""
    for name, content in contents.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}, {name}: names a file outside")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    told = json.loads(contents["made.json"])
    for names in told["evaluations"].values():
        for name in names:
            _check_scores(f"{path}, {name}", json.loads(contents[name]))
    files = {key: [folder / name for name in names] for key, names in told["evaluations"].items()}
    made = MadeFrom(**{field.name: told[field.name] for field in fields(MadeFrom)})
    again = folder / "again.csv", folder / "again.md"
    make_paper_table(PaperTable.load("table", folder), files, made, *again)
    for name, file in zip(("table.csv", "table.md"), again, strict=True):
        ours, theirs = (
            file.read_text(encoding="utf-8").splitlines(),
            contents[name].decode().splitlines(),
        )
        for number, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue=""), start=1):
            if one != other:
                raise BundleError(
                    f"{path}, {name}, line {number}: its scores give '{one}', and it says '{other}'"
                )
    return f"the table of {len(files)} evaluations is what their per-task scores give (commit {made.commit})"


def _check_scores(where: str, evaluation: Mapping[str, Any]) -> None:
    """Refuse metrics of a task that are not those of its scores; the answers that maj@k counts are not in there."""
    k = evaluation["k"]
    for task in evaluation["tasks"]:
        known = [score for score in task["scores"] if score is not None]
        own = (
            {f"avg@{k}": fmean(known), f"pass@{k}": pass_at(known, min(k, len(known)))}
            if known
            else {}
        )
        for metric, value in own.items():
            if abs(task["metrics"][metric] - value) > 1e-9:
                says = f"task '{task['task_id']}' says {metric} {task['metrics'][metric]:g}"
                raise BundleError(f"{where}: {says}; its scores give {value:g}")


def _name(path: Path, results: Path) -> str:
    return f"runs/{path.relative_to(results).as_posix()}"


def _json(value: Any) -> bytes:
    return f"{json.dumps(value, indent=1, ensure_ascii=False)}\n".encode()


def _crate(table: PaperTable, contents: Mapping[str, bytes]) -> bytes:
    """The description of all files, in JSON-LD."""
    files = {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    about = {
        "metadata": METADATA,
        "version": importlib.metadata.version("mcore-mas"),
        "tolerance": _TOLERANCE,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return _json(
        json.loads(render_page("ro-crate.json.jinja", table=table, files=files, now=now, **about))
    )


def _inputs(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Digest and size of the data, models, encoders, tasks and indexes that the runs began with."""
    paths: dict[Path, None] = {}
    for run in runs:
        config = read_yaml(run / "config.yaml")
        folders = [policy["model"] for policy in config["policies"].values() if policy["model"]]
        retriever = config.get("retriever") or {}
        folders += filter(None, (retriever.get(key) for key in ("folder", "encoder_folder")))
        passages = retriever.get("passages")
        data = [
            *DataConfig.model_validate(config["data"]).paths,
            *([Path(passages)] if passages else []),
        ]
        paths |= dict.fromkeys(data)
        for folder in (*map(Path, folders), run / "tasks", run / "index"):
            paths |= dict.fromkeys(sorted(file for file in folder.rglob("*") if file.is_file()))
    there = [path for path in paths if path.is_file()]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(sha256, there))
    return [
        {"path": path.as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(there, digests, strict=True)
    ]


def _code() -> dict[str, str]:
    """The commit that bundles, and a digest over the digests of all its files; made.json has that of the table."""
    root = Path(__file__).resolve().parents[2]
    lines = []
    for name in _CODE:
        above = SHIPPED if name in ("configs", "workflow") else root
        files = sorted(
            file
            for file in (above / name).rglob("*")
            if file.suffix in (".py", ".yaml", ".smk", ".json")
        )
        lines += [f"{sha256(file)}  {file.relative_to(above)}\n" for file in files]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"commit": code_commit(), "sha256": digest, "files": str(len(lines))}


def _environment() -> dict[str, Any]:
    """The machine that wrote the bundle; what a run trained on is in its done.json."""
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
    }
