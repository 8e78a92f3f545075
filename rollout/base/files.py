"""Atomic files and folders, complete or absent, and their digests; YAML and JSON within bounds."""

import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from rollout.base.failpoints import failpoint
from rollout.base.ownership import FolderError

Digest = dict[str, int | str]  # a file's "bytes" and "sha256"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: what is written there becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{path.name}.{socket.gethostname()}-"
    temporary = path.with_name(f"{mine}{os.getpid()}.partial")
    for left in path.parent.glob(".*.partial"):  # of this path, by processes that were killed
        owner = left.name.removeprefix(mine).removesuffix(".partial")
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            left.unlink(missing_ok=True)
    try:
        failpoint(f"file.begun:{path.name}")
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        failpoint(f"file.written:{path.name}")
        temporary.replace(path)
        failpoint(f"file.there:{path.name}")
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(
            error.errno, error.strerror, str(path)
        ) from error  # a full disk does not say of what file
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, mode: int = 0o700) -> Iterator[Path]:
    """A new folder beside `path`, this user's alone, that takes its place when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode, parents=True)
    failpoint(f"folder.begun:{path.name}")
    yield partial
    failpoint(f"folder.written:{path.name}")
    shutil.rmtree(path, ignore_errors=True)
    failpoint(f"folder.removed:{path.name}")
    partial.rename(path)
    failpoint(f"folder.there:{path.name}")


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, complete or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# libyaml's parser is ten times as fast; PyYAML may have been built without it.
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_YAML_VALUES = 1_000_000


def read_yaml(path: Path, loader_class: Any = _YAML_LOADER) -> Any:
    """Read a YAML file of plain values.

    Args:
        loader_class: a safe loader of PyYAML.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is not YAML or not UTF-8, gives a key twice, or its aliases stand for too
            many values.
    """
    with path.open(encoding="utf-8") as stream:  # PyYAML names the stream in its errors
        loader = loader_class(stream)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_yaml_nodes(root)
            return loader.construct_document(root)
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"{path} is not in UTF-8: {error}; save it as UTF-8") from None
        finally:
            loader.dispose()


def _check_yaml_nodes(root: yaml.Node) -> None:
    """Refuse a key that is given twice, of which PyYAML would take the last, and alias bombs."""
    unvisited = [root]
    visited = 0
    while unvisited:
        node = unvisited.pop()
        visited += 1  # an aliased node counts as often as it is referred to
        if visited > _MAX_YAML_VALUES:
            raise yaml.YAMLError(
                f"more than {_MAX_YAML_VALUES} values with its aliases written out"
            )
        if isinstance(node, yaml.SequenceNode):
            unvisited.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                if (key.tag, str(key.value)) in keys:
                    raise yaml.YAMLError(f"key '{key.value}' is there twice{key.start_mark}")
                keys.add((key.tag, str(key.value)))
                unvisited.append(value)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, complete or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, most: int = 64 << 20) -> Any:
    """The content of a JSON file of at most `most` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or larger, or too deep.
    """
    if path.stat().st_size > most:
        raise ValueError(f"more than {most} bytes")
    try:
        return json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise ValueError("too many brackets in each other") from None


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as JSON keeps it, with a digest of all else that is in it."""
    plain = {name: own for name, own in json.loads(json.dumps(value)).items() if name != "sha256"}
    return {
        **plain,
        "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(),
    }


def unsealed(value: Any) -> Any:
    """What was `sealed`, and what has no seal as it is; ValueError if it is not what was written."""
    if not isinstance(value, dict) or "sha256" not in value:
        return value
    if sealed(value) != value:
        raise ValueError("it is not what was written")
    return {name: own for name, own in value.items() if name != "sha256"}


def read_record(path: Path, *names: str) -> dict[str, Any]:
    """An object that a stage has written, sealed or not; FolderError if it is damaged or has not these names."""
    try:
        value = read_json(path)
        found = dict(unsealed(value) if isinstance(value.get("sha256"), str) else value)
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"it has no {missing[0]}")
    except (OSError, ValueError, AttributeError) as error:
        raise FolderError(
            f"{path}: damaged ({' '.join(str(error).split())}); remove it and have it made again"
        ) from error
    return found


def json_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects in a file's lines from byte `start` on, and where the last whole line ends.

    A line that holds none, as when a process was killed while it wrote, is passed over.
    """
    with path.open("rb") as file:
        file.seek(start)
        whole, end, _ = file.read().rpartition(b"\n")
    rows = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)], start + len(whole) + len(end)


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write `chunks` through to the disk; what was written, digested on the way."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        failpoint(f"chunks.begun:{path.name}")
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    failpoint(f"chunks.written:{path.name}")
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    """See that the names in `folder` are on disk, as its files' contents are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(*paths: Path) -> str:
    """Hexadecimal digest of the files' bytes one after another; for one file, what `sha256sum` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def tree_sha256(folder: Path) -> dict[str, str]:
    """`sha256` of every file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def check_tree(folder: Path, written: Mapping[str, str]) -> None:
    """Refuse a folder whose files are not those of an earlier `tree_sha256`; further ones are nobody's concern.

    Raises:
        FolderError: which is not there, or another.
    """
    for name, digest in written.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise FolderError(
                f"{folder / name}: not there, or not as it was written; train again or bring it back"
            )


def file_stamp(path: Path) -> list[int]:
    """Size, times and inode of a file: as long as they are the same, so is what it holds."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def known_sha256(*paths: Path, again: bool = False) -> str:
    """`sha256` of files, from the stamp `.NAME.sha256` beside the first while sizes, times and inodes are as they were.

    That of files in a folder that is read only, as models that people share, is in the home folder.

    Args:
        again: read the files whatever the stamp says.
    """
    paths = tuple(path.resolve() for path in paths)
    of, stamp = list(map(file_stamp, paths)), paths[0].with_name(f".{paths[0].name}.sha256")
    own = (
        Path.home()
        / ".cache"
        / "mcore-mas"
        / f"{hashlib.sha256(bytes(stamp)).hexdigest()[:32]}.sha256"
    )
    for place in (stamp, own):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            said = json.loads(place.read_bytes())
            if said["of"] == of and not again:
                return str(said["sha256"])
    found = sha256(*paths)
    for place in (stamp, own):
        with contextlib.suppress(OSError):
            write_json(place, {"sha256": found, "of": of})
            break
    return found


def writable(folder: Path) -> Path:
    """Make `folder`, this user's alone if it is new, and return it; FolderError if it cannot be made or written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(
            f"{folder}: cannot write here ({error.strerror}); choose another results folder or its rights"
        ) from error
    return folder


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block for `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
