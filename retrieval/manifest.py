"""Manifest of an index folder, with digests of its files that are checked when it is opened."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from retrieval.atomic_files import write_json_file
from retrieval.corpus import RetrievalError
from retrieval.encoder import EncoderIdentity
from retrieval.regular_files import read_regular_bytes

MANIFEST = "index.json"
VECTORS = "vectors.faiss"
INDEX_FORMAT = "inner-product/2"
# Keys of earlier versions that are ignored.
OLD_KEYS = ("facets_sha256",)
# Largest accepted |v·e - e·e| / (e·e) between the stored vector v of a passage and the vector e that
# the encoder computes for it again.
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_ROUNDED = 2e-2  # vectors in half precision or 8 bits, and published files
TOLERANCE_PRODUCT_QUANTISED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of `index.json`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    format: str
    encoder: EncoderIdentity | None  # None: the index has words (BM25) and no vectors
    dim: int
    ntotal: int  # number of passages
    corpus: str  # path of the corpus, relative to the index folder
    corpus_sha256: str
    index_sha256: str  # digest of the FAISS file `vectors`; "" if the index has no vectors
    vectors: str = VECTORS  # name of the FAISS file in the index folder
    # Largest relative error of a stored vector that `check_canary` accepts.
    tolerance: float = TOLERANCE_FLOAT32
    lexical_sha256: str = ""  # digest of the BM25 index, "" if there is none


def write_manifest(index_dir: Path, manifest: Manifest) -> None:
    """Write `index.json` with a digest of the other keys."""
    values = asdict(manifest)
    write_json_file(index_dir / MANIFEST, {**values, "sha256": _values_sha256(values)})


def read_manifest(index_dir: Path | str) -> Manifest:
    """Read `index.json`; raise RetrievalError if it is missing, damaged or of another format."""
    path = Path(index_dir) / MANIFEST
    try:
        values = json.loads(read_regular_bytes(path))
        if isinstance(values, dict) and "sha256" in values:
            sha256 = values.pop("sha256")
            if sha256 != _values_sha256(values):
                raise ValueError("it was changed after it was written")
            for key in OLD_KEYS:
                values.pop(key, None)
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(values))
    except FileNotFoundError:
        raise RetrievalError(
            f"{path} does not exist: no index was finished there; build it"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RetrievalError(f"{path} is damaged ({reason}); build the index again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RetrievalError(f"{path} is damaged ({error}); build the index again") from None
    check_equal(path, "format", manifest.format, INDEX_FORMAT)
    check_equal(path, "dim", manifest.dim, manifest.encoder.dim if manifest.encoder else 0)
    return manifest


def check_equal(where: Path | str, name: str, value: object, expected: object) -> None:
    """Raise RetrievalError if a property of an index or a corpus has another value than expected."""
    if value != expected:
        raise RetrievalError(
            f"{where}: {name} is {value!r}, expected {expected!r}; "
            "build the index again, or restore the files it was built from"
        )


def _values_sha256(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
