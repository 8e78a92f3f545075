"""Files of a hub (Hugging Face's routes) or of GitHub: fetched by revision, verified, and recorded in a lock file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from mcore_mas.pipeline.sources import SOURCES_FILE, Source
from rollout.base.files import Digest, sha256, waited_for, write_json

LOCK = Path("data/sources.lock")
_MODEL_FILES = (
    ".safetensors",
    ".json",
    ".txt",
    ".model",
    ".jinja",
)  # of a model, at the top of its repository
_DENIED = (401, 403)


class AcquireError(RuntimeError):
    """Something cannot be had, or is not what it should be: what, where, and what to do, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where files come from, and what has been recorded of those that came."""

    endpoint: str = field(
        default_factory=lambda: huggingface_hub.constants.ENDPOINT
    )  # of HF_ENDPOINT
    github: str = "https://raw.githubusercontent.com"
    offline: bool = field(default_factory=huggingface_hub.is_offline_mode)
    lock: Path = LOCK

    def recorded(self, repository: str) -> dict[str, Any]:
        """`revision`, and `files` with the bytes and sha256 of each, of what was fetched before; {} if nothing was."""
        return (
            dict(json.loads(self.lock.read_text(encoding="utf-8")).get(repository, {}))
            if self.lock.exists()
            else {}
        )

    def record(self, repository: str, revision: str, files: Mapping[str, Digest]) -> None:
        """Add to the lock file what was fetched."""
        with waited_for(self.lock):
            content = (
                json.loads(self.lock.read_text(encoding="utf-8")) if self.lock.exists() else {}
            )
            known = content.get(repository, {})
            before = known["files"] if known.get("revision") == revision else {}
            content[repository] = {"revision": revision, "files": {**before, **files}}
            write_json(self.lock, dict(sorted(content.items())))


def fetch(source: Source, folder: Path, hub: Hub, *, model: bool = False) -> dict[str, Digest]:
    """Bring a source's files into `folder`, each complete or absent; an interrupted file goes on where it ended.

    The revision and every digest are those of the source, else of the lock file, else what the hub says; the lock file
    then has them all. Files that are there already with their digest are not asked for again.

    Returns the size and sha256 of each file.

    Raises:
        AcquireError: no access, no such revision or file, no answer, or other bytes than were expected.
    """
    repository = source.repository
    if repository is None:
        raise AcquireError(
            f"{folder}: it is on no hub; put it there by hand, from {source.by_hand}"
        )
    known = hub.recorded(repository)
    if source.revision and known.get("revision", source.revision) != source.revision:
        known = {}  # of another revision
    with waited_for(folder):
        if kept := _kept(source, folder, known, model):
            return kept
        if hub.offline:
            raise AcquireError(
                f"{repository}: offline, and its files are not in {folder}; put them there by hand"
            )
        if source.host == "github":
            with _explained(
                source, hub.github, f"{hub.github}/{repository}", "put its file there by hand"
            ):
                return _download_pinned(source, folder, hub)
        page = f"{hub.endpoint}/{'' if model else 'datasets/'}{repository}"
        with _explained(source, hub.endpoint, page, "name another hub in HF_ENDPOINT"):
            return _download(source, folder, hub, known, model)


def _kept(source: Source, folder: Path, known: Mapping[str, Any], model: bool) -> dict[str, Digest]:
    """The files that are there already, if these are all that the lock file names and their bytes are the same."""
    names = _matching(source, list(known.get("files", {})), model)
    expected = {name: known["files"][name] for name in names}
    same = all(
        (folder / name).is_file() and sha256(folder / name) == own["sha256"]
        for name, own in expected.items()
    )
    return expected if same else {}


def _download_pinned(source: Source, folder: Path, hub: Hub) -> dict[str, Digest]:
    """Files of GitHub, where nobody lists digests: the source has them, and the commit."""
    root, repository, revision = hub.github, str(source.repository), str(source.revision)
    fetched = {}
    for name in source.files:
        digests = {SOURCES_FILE.name: source.sha256[name]}
        fetched[name] = _fetch_file(
            f"{root}/{repository}/{revision}/{name}", folder / name, None, digests, headers={}
        )
    hub.record(repository, revision, fetched)
    return fetched


def _download(
    source: Source, folder: Path, hub: Hub, known: Mapping[str, Any], model: bool
) -> dict[str, Digest]:
    repository, kind = str(source.repository), "model" if model else "dataset"
    asked = source.revision or known.get("revision")
    api = huggingface_hub.HfApi(endpoint=hub.endpoint)
    info = (api.model_info if model else api.dataset_info)(
        repository, revision=asked, files_metadata=True
    )
    there = {file.rfilename: file for file in info.siblings or ()}
    if outside := [name for name in there if name[:1] == "/" or ".." in name.split("/")]:
        raise AcquireError(
            f"{repository}: {hub.endpoint} lists {outside[0]!r}, which leads out of its folder"
        )
    names = _matching(source, list(there), model)
    if not names:
        raise AcquireError(
            f"{repository} at {info.sha}: no file like {' or '.join(source.files)}; it has {', '.join(there) or 'none'}"
        )
    fetched = {}
    for name in names:
        large = there[name].lfs
        url = huggingface_hub.hf_hub_url(
            repository, name, repo_type=kind, revision=str(info.sha), endpoint=hub.endpoint
        )
        digests = {
            f"{SOURCES_FILE.name}": source.sha256.get(name),
            f"{hub.lock}": known.get("files", {}).get(name, {}).get("sha256"),
            f"{hub.endpoint}": large.sha256 if large else None,
        }
        size = large.size if large else there[name].size
        fetched[name] = _fetch_file(url, folder / name, size, digests, headers=build_hf_headers())
    hub.record(repository, str(info.sha), fetched)  # once all are there
    return fetched


def _matching(source: Source, names: list[str], model: bool) -> list[str]:
    if model:
        return sorted(name for name in names if "/" not in name and name.endswith(_MODEL_FILES))
    found = ([name for name in names if fnmatchcase(name, pattern)] for pattern in source.files)
    return sorted(next(filter(None, found), []))


def _fetch_file(
    url: str,
    path: Path,
    size: int | None,
    digests: Mapping[str, str | None],
    *,
    headers: dict[str, str],
) -> Digest:
    """Bring one file, or find it there; `digests` are the expected ones by who says so.

    Of a file whose `size` is not known nothing is kept: a whole one could not be told from a part.
    """
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        path.replace(
            partial
        )  # fetched before its digest was recorded, or to be checked against another one
    if partial.exists() and (size is None or partial.stat().st_size > size):
        partial.unlink()
    disable_progress_bars()
    with partial.open("ab") as file:
        http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)
    found = sha256(partial)
    for whose, expected in digests.items():
        if expected not in (None, found):
            partial.unlink()
            raise AcquireError(
                f"{url}: sha256 is {found}, but {whose} says {expected}; removed, fetch it again"
            )
    partial.replace(path)
    print(f"{path}: {path.stat().st_size} bytes, sha256 {found}", flush=True)
    return {"bytes": path.stat().st_size, "sha256": found}


@contextmanager
def _explained(source: Source, host: str, page: str, else_do: str) -> Iterator[None]:
    """Failures of a host as one line that says what to do."""
    try:
        yield
    except RevisionNotFoundError:
        raise AcquireError(
            f"{source.repository}: no revision {source.revision} at {host}"
        ) from None
    except (HfHubHTTPError, httpx2.HTTPStatusError) as error:
        status = error.response.status_code
        if (
            isinstance(error, GatedRepoError)
            or (source.gated and status in _DENIED)
            or status == 403
        ):
            licence = f"the licence {source.licence}" if source.licence else "its licence"
            raise AcquireError(
                f"{source.repository}: no access ({status}); accept {licence} at {page}, and set HF_TOKEN to a token "
                "of that account"
            ) from None
        if isinstance(error, RepositoryNotFoundError) or status in _DENIED:
            raise AcquireError(
                f"{page}: no such repository, or it is not public ({status}); see HF_TOKEN"
            ) from None
        raise AcquireError(f"{page}: answered {status}; try again, or {else_do}") from None
    except (httpx2.TransportError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AcquireError(
            f"{host}: cannot fetch {source.repository} ({reason}); start it again, what came is kept, or {else_do}"
        ) from None
