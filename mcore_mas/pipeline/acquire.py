"""Acquisition of a run's inputs: downloaded, converted and checked, with a receipt for each."""

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from mcore_mas.pipeline.convert import assemble, check_data, convert
from mcore_mas.pipeline.hub import AcquireError, Hub, fetch
from mcore_mas.pipeline.sources import Source, load_sources
from rollout.base.digests import Digest
from rollout.base.errors import ModelError
from rollout.base.json_files import write_json
from rollout.models.architecture import read_config

_DOWNLOADS = Path("data/raw")


def acquire(item: str, receipt: Path, hub: Hub) -> None:
    """Download and convert an input, or import an index, or check what exists; write its receipt.

    Args:
        item: path of the input, which is a key of workflow/sources.yaml.
        receipt: JSON file to write, with the input's origin, revision, files and counts.
        hub: hosts to download from.

    Raises:
        AcquireError, RetrievalError: the input cannot be acquired, or fails its checks.
    """
    source = load_sources()[item]
    path = Path(item)
    exists = path.exists()

    files: dict[str, Digest] = {}
    if source.encoder:  # only an index has one
        counts = _acquire_index(source, path)
    elif path.parts[0] == "models":
        files, counts = _acquire_model(source, path, hub)
    else:
        files, counts = _acquire_data(source, path, hub)

    origin = "was there" if exists else source.description
    revision = hub.recorded(str(source.repository)).revision if files else None
    write_json(
        receipt,
        {"item": item, "origin": origin, "revision": revision, "files": files, **counts},
    )
    print(f"{item}: {origin}, {counts}")


def _acquire_index(source: Source, manifest_path: Path) -> dict[str, Any]:
    """Import a published index, or verify one that was imported; return its size and counts."""
    from retrieval.build import import_index
    from retrieval.encoder import Encoder
    from retrieval.index import Index

    # The paths in the order in which workflow/sources.yaml names them.
    vectors, corpus, encoder_folder = map(Path, source.needs)
    encoder = Encoder.of(str(source.encoder), encoder_folder)
    if manifest_path.exists():
        manifest = Index.open(manifest_path.parent, encoder=encoder.identity).manifest
    else:
        manifest = import_index(vectors, corpus, encoder)
    return {
        "bytes": vectors.stat().st_size,
        "rows": manifest.ntotal,
        "kept": manifest.ntotal,
    }


def _acquire_model(
    source: Source, path: Path, hub: Hub
) -> tuple[dict[str, Digest], dict[str, Any]]:
    """Download a model folder unless it exists; return the downloaded files and its size."""
    if path.exists():
        return {}, _check_model(path)
    partial = path.with_name(f".{path.name}.partial")
    files = fetch(source, partial, hub, is_model=True)
    counts = _check_model(partial)
    partial.rename(path)
    return files, counts


def _acquire_data(source: Source, path: Path, hub: Hub) -> tuple[dict[str, Digest], dict[str, Any]]:
    """Download a data file unless it exists; return the downloaded files and counts of its rows."""
    files: dict[str, Digest] = {}
    counts: dict[str, Any] = {}
    if path.exists():
        if source.format:
            counts = asdict(check_data(path, source))
    else:
        folder = _DOWNLOADS / str(source.repository).replace("/", "--")
        files = fetch(source, folder, hub)
        downloaded = [folder / name for name in files]
        if source.format:
            counts = asdict(convert(downloaded, source, path))
        else:
            assemble(downloaded, path)
    return files, {**counts, "bytes": path.stat().st_size}


def _check_model(folder: Path) -> dict[str, Any]:
    """Check a model folder's config, weight headers and tokenizer; return its type and size."""
    # These imports load torch, which the other functions do without.
    from transformers import AutoTokenizer

    from rollout.models.tensors import tensor_shapes

    try:
        model_type = read_config(folder).get("model_type")
        shapes = tensor_shapes(folder)
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ModelError as error:
        raise AcquireError(f"{error}; remove {folder} to have it fetched") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise AcquireError(
            f"{folder}: its tokenizer cannot be read ({reason}); remove it to have it fetched"
        ) from None
    return {
        "model_type": model_type,
        "tensors": len(shapes),
        "parameters": sum(prod(shape) for shape in shapes.values()),
    }
