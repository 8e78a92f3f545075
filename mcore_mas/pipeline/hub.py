"""Download of data sets and models from a Hugging Face hub, or of files from GitHub.

`fetch` downloads the files of a source. Their revision and digests are recorded in
data/sources.lock, and later downloads must agree with them.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from mcore_mas.pipeline.sources import SOURCES_FILE, Source
from rollout.base.digests import Digest, sha256
from rollout.base.files import atomic_path, file_lock
from rollout.base.http import ssl_context
from rollout.base.json_files import read_json, write_json

LOCK = Path("data/sources.lock")
# Files of a model, at the top of its repository.
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
_DENIED = (401, 403)
_TIMEOUT_S = 30.0


class AcquireError(RuntimeError):
    """An input cannot be acquired, or is not what was expected; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """Revision and files that were downloaded from a repository."""

    revision: str = ""  # a commit
    files: Mapping[str, Digest] = field(default_factory=dict)

    def sha256(self, name: str) -> str | None:
        """Return the digest of a file, None if the file was not downloaded."""
        digest = self.files.get(name)
        return None if digest is None else str(digest["sha256"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Hosts that files are downloaded from, and the lock file of what was downloaded.

    Attributes:
        endpoint: URL of the Hugging Face hub, by default that of HF_ENDPOINT.
        github: URL of GitHub's raw files.
        offline: True if nothing may be downloaded, by default if HF_HUB_OFFLINE is set.
        lock: the lock file, JSON.
    """

    endpoint: str = field(default_factory=lambda: huggingface_hub.constants.ENDPOINT)
    github: str = "https://raw.githubusercontent.com"
    offline: bool = field(default_factory=huggingface_hub.is_offline_mode)
    lock: Path = LOCK

    def recorded(self, repository: str) -> LockEntry:
        """Return the lock file's entry of a repository, an empty one if there is none."""
        return self._entries().get(repository, LockEntry())

    def record(self, repository: str, revision: str, files: Mapping[str, Digest]) -> None:
        """Add downloaded files to the lock file; those of another revision are replaced."""
        with file_lock(self.lock):
            entries = self._entries()
            previous = entries.get(repository)
            if previous is not None and previous.revision == revision:
                files = {**previous.files, **files}
            entries[repository] = LockEntry(revision=revision, files=files)
            content = {
                name: {"revision": entry.revision, "files": dict(entry.files)}
                for name, entry in sorted(entries.items())
            }
            write_json(self.lock, content)

    def _entries(self) -> dict[str, LockEntry]:
        if not self.lock.exists():
            return {}
        content = read_json(self.lock)
        return {name: LockEntry(**entry) for name, entry in content.items()}


def fetch(source: Source, folder: Path, hub: Hub, *, is_model: bool = False) -> dict[str, Digest]:
    """Download a source's files into a folder.

    The revision is the source's, else the lock file's, else the newest. The digest of each file
    must be that of the source, of the lock file and of the hub, as far as they state one. A broken
    connection is resumed; after an interruption, complete files are kept. Nothing is downloaded if
    all files are there with their recorded digests.

    Args:
        is_model: True for a model repository, False for a data set.

    Returns:
        Size and SHA-256 of each file by its name in the repository.

    Raises:
        AcquireError: no access, no such revision or file, no answer, or a wrong digest.
    """
    repository = source.repository
    if repository is None:
        raise AcquireError(
            f"{folder}: it is on no hub; put it there by hand, from {source.by_hand}"
        )
    entry = hub.recorded(repository)
    if source.revision and entry.revision != source.revision:
        entry = LockEntry(revision=source.revision)

    with file_lock(folder):
        files = _downloaded_before(source, folder, entry, is_model)
        if files:
            return files
        if hub.offline:
            raise AcquireError(
                f"{repository}: offline, and its files are not in {folder}; put them there by hand"
            )

        if source.host == "github":
            page = f"{hub.github}/{repository}"
            advice = "put its file there by hand"
            with _explained(source, entry.revision, hub.github, page, advice):
                revision, files = _download_from_github(source, folder, hub)
        else:
            page = f"{hub.endpoint}/{'' if is_model else 'datasets/'}{repository}"
            advice = "name another hub in HF_ENDPOINT"
            with _explained(source, entry.revision, hub.endpoint, page, advice):
                revision, files = _download_from_hub(source, folder, hub, entry, is_model)
        hub.record(repository, revision, files)
    return files


def _downloaded_before(
    source: Source, folder: Path, entry: LockEntry, is_model: bool
) -> dict[str, Digest]:
    """Return the recorded files if all are there with their digests, else {}."""
    names = _select_files(source, list(entry.files), is_model)
    for name in names:
        path = folder / name
        if not path.is_file() or sha256(path) != entry.sha256(name):
            return {}
    return {name: entry.files[name] for name in names}


def _select_files(source: Source, names: Sequence[str], is_model: bool) -> list[str]:
    """Select a model's files, or the matches of the source's first pattern that has any."""
    if is_model:
        return sorted(name for name in names if "/" not in name and name.endswith(_MODEL_SUFFIXES))
    for pattern in source.files:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if matches:
            return sorted(matches)
    return []


def _download_from_hub(
    source: Source, folder: Path, hub: Hub, entry: LockEntry, is_model: bool
) -> tuple[str, dict[str, Digest]]:
    """Download files of a hub; return their revision and digests."""
    repository = str(source.repository)
    repo_type = "model" if is_model else "dataset"
    api = huggingface_hub.HfApi(endpoint=hub.endpoint)
    repository_info = api.model_info if is_model else api.dataset_info
    info = repository_info(repository, revision=entry.revision or None, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in siblings:
        if name.startswith("/") or ".." in name.split("/"):
            raise AcquireError(
                f"{repository}: {hub.endpoint} lists {name!r}, which leads out of its folder"
            )
    names = _select_files(source, list(siblings), is_model)
    if not names:
        raise AcquireError(
            f"{repository} at {info.sha}: no file like {' or '.join(source.files)}; "
            f"it has {', '.join(siblings) or 'none'}"
        )

    disable_progress_bars()
    files = {}
    for name in names:
        large_file = siblings[name].lfs
        expected = {
            SOURCES_FILE.name: source.sha256.get(name),
            str(hub.lock): entry.sha256(name),
            hub.endpoint: large_file.sha256 if large_file else None,
        }
        huggingface_hub.hf_hub_download(
            repository,
            name,
            repo_type=repo_type,
            revision=str(info.sha),
            endpoint=hub.endpoint,
            local_dir=folder,
        )
        files[name] = _verified(folder / name, expected)
    # The library's own records of the download would become part of a model's folder.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return str(info.sha), files


def _download_from_github(source: Source, folder: Path, hub: Hub) -> tuple[str, dict[str, Digest]]:
    """Download files of GitHub, whose commit and digests the source states; return both."""
    revision = str(source.revision)
    files = {}
    for name in source.files:
        url = f"{hub.github}/{source.repository}/{revision}/{name}"
        with atomic_path(folder / name) as partial:
            _download_url(url, partial)
        files[name] = _verified(folder / name, {SOURCES_FILE.name: source.sha256[name]})
    return revision, files


def _download_url(url: str, path: Path) -> None:
    with (
        httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S, verify=ssl_context()) as client,
        client.stream("GET", url) as response,
        path.open("wb") as file,
    ):
        response.raise_for_status()
        for chunk in response.iter_bytes():
            file.write(chunk)


def _verified(path: Path, expected: Mapping[str, str | None]) -> Digest:
    """Return the digest of a downloaded file; remove the file if the digest is wrong.

    Args:
        expected: SHA-256 by the file or the host that states it; None if it states none.
    """
    digest = sha256(path)
    for authority, stated in expected.items():
        if stated not in (None, digest):
            path.unlink()
            raise AcquireError(
                f"{path}: sha256 is {digest}, but {authority} says {stated}; "
                "the file is removed, fetch it again"
            )
    size = path.stat().st_size
    print(f"{path}: {size} bytes, sha256 {digest}", flush=True)
    return {"bytes": size, "sha256": digest}


@contextmanager
def _explained(
    source: Source, revision: str, host: str, page: str, alternative: str
) -> Iterator[None]:
    """Convert failures of a host to AcquireErrors of one line, with advice.

    Args:
        revision: requested revision: the source's, or else that of the lock file.
        page: URL of the repository.
        alternative: advice for a host that does not answer.
    """
    try:
        yield
    except RevisionNotFoundError:
        raise AcquireError(f"{source.repository}: no revision {revision} at {host}") from None
    except (HfHubHTTPError, httpx2.HTTPStatusError, httpx.HTTPStatusError) as error:
        status = error.response.status_code
        gated = isinstance(error, GatedRepoError) or (source.gated and status in _DENIED)
        if gated or status == 403:
            licence = f"the licence {source.licence}" if source.licence else "its licence"
            raise AcquireError(
                f"{source.repository}: no access ({status}); accept {licence} at {page}, "
                "and set HF_TOKEN to a token of that account"
            ) from None
        if isinstance(error, RepositoryNotFoundError) or status in _DENIED:
            raise AcquireError(
                f"{page}: no such repository, or it is not public ({status}); see HF_TOKEN"
            ) from None
        raise AcquireError(f"{page}: answered {status}; try again, or {alternative}") from None
    except (httpx2.HTTPError, httpx.HTTPError, OSError) as error:
        raise AcquireError(
            f"{host}: cannot fetch {source.repository} ({_reason(error)}); start it again, "
            f"complete files are kept, or {alternative}"
        ) from None
    except (
        httpx2.InvalidURL,
        httpx.InvalidURL,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise AcquireError(
            f"{page}: the answer is not as a hub gives it ({_reason(error)}); {alternative}"
        ) from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
