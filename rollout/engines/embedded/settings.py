"""Settings of an embedded engine in a Ray actor."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """Settings of an embedded engine in a Ray actor.

    Attributes:
        folder: Hugging Face folder of the model.
        max_length: maximum number of tokens of prompt and reply.
        rows: number of sequences that the cache holds.
        version: version of the weights in `folder`.
        threads: CPU threads of the actor.
        deterministic, routing: see `EmbeddedEngine`.
        device, bf16: see `CachedDecoder`; "cuda" needs a GPU in `placement`.
        placement: Ray actor options; None: no resources are reserved.
        transport: transport of new weights, "shared" or "disk".
        weights_folder: folder through which the trainer sends weights with the transport "disk"; None:
            a new folder in `/dev/shm`.
        restarts: maximum number of restarts of the actor within an hour.
        hang_s: seconds that the actor may take for one call before it is killed and started again.
    """

    folder: Path | str
    max_length: int
    rows: int = 192
    version: int = 0
    threads: int = 1
    deterministic: bool = False
    routing: bool = False
    bf16: bool = False
    device: str = "cpu"
    placement: Mapping[str, Any] | None = None
    transport: str = "shared"
    weights_folder: Path | str | None = None
    restarts: int = 2
    hang_s: float = 600.0
