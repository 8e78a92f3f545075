"""Section of a config about the search engine that the environment asks."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rollout.base.section import Section
from rollout.base.urls import Url


class RetrieverConfig(Section):
    """The search engine that the environment asks."""

    # Servers that run elsewhere; without them, each job of the run starts a server for itself.
    urls: tuple[Url, ...] = ()
    # File with the bearer token of `urls`.
    key_file: Path | None = None
    # Seconds that the run waits while no server answers.
    patience_s: float = Field(1800.0, ge=0)
    # Seconds of one search, including its wait behind others.
    timeout_s: float = Field(300.0, gt=0)

    # --- index of the run's own server

    # Corpus to index; None: the corpus of the task generator.
    passages: Path | None = None
    # Folder of a published index with its index.json, which is served in place of one that the run builds.
    folder: Path | None = None
    encoder: Literal["minilm", "e5", "bge"] = "minilm"
    # Hugging Face folder of the encoder; None: the MiniLM package.
    encoder_folder: Path | None = None
    index: Literal["flat", "sq8", "ivf", "ivfpq", "hnsw"] = "flat"
    # Number of jobs that encode the passages, each a part of them.
    shards: int = Field(1, ge=1)
    # Queries and the ids that they should find, for the rule `probe_retriever`.
    golden: Path | None = None

    # --- the run's own server

    # Search by vectors, by words, or by both fused.
    ranking: Literal["dense", "bm25", "hybrid"] = "dense"
    # Device of the encoder and of a flat index.
    device: Literal["cpu", "cuda"] = "cpu"
    # Python of the environment that retrieval/environment.yml describes; None: the run's Python.
    python: Path | None = None
    threads: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        sources = [key for key in ("urls", "passages", "folder") if getattr(self, key)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} say where passages are; set one of them")
        if self.encoder != "minilm" and self.encoder_folder is None:
            raise ValueError(
                f"encoder {self.encoder} has no folder; set encoder_folder, such as "
                "models/e5-base-v2"
            )
        if self.ranking == "bm25" and self.shards > 1:
            raise ValueError("ranking bm25 encodes no passages; leave out shards")
        if self.key_file is not None and not self.urls:
            raise ValueError(
                "key_file is the token of servers that run elsewhere; set urls too, or leave it out"
            )
        return self

    @property
    def elsewhere(self) -> bool:
        """True if the servers run elsewhere."""
        return bool(self.urls)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run's own server: 1 (it takes the machine's last one) or 0."""
        return int(self.device == "cuda" and not self.elsewhere)
