"""Engines of a run: `EngineRequest`, and `build_engines`, which returns the engines of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.base.lookup import lookup_import
from rollout.engines.config import EngineConfig
from rollout.engines.registry import ENGINES

if TYPE_CHECKING:
    from rollout.models.adapter_weights import AdapterShape

# Returns a context manager for the restart of an engine process.
RestartGuard = Callable[[], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Request for the engines of some policies that have one model.

    Attributes:
        policies: one policy, or one for each of `adapters`.
        model: Hugging Face folder.
        config: section `engine` of the policies.
        log_folder: folder of the servers' logs.
        trained: True if trainers send weights. Ray must be running then.
        version: version of the weights in `model`; 0 for a training.
        adapters: shapes of the adapters that the engine holds in addition to the model; empty if it
            takes full weights.
        threads: CPU threads of each engine process.
        bf16: True if the policies are trained in bfloat16.
        weights_folder: folder through which trainers send weights with the transport "disk", and
            adapters to SGLang; None: a new folder in `/dev/shm`, or for replicas of the embedded
            engine one in `log_folder`.
        placements: Ray actor options of each of the engine's devices; None: Ray chooses.
        multi_node: True if servers may be on other nodes than this process.
        shares_gpus: True if other engines are on the same GPUs.
        gpus: names of the GPUs of each server in an evaluation; empty for a server on the CPU. None:
            the GPUs are not assigned.
        visible_gpus: names of the GPUs that this process sees, in their order.
        restart_guard: context manager around the restart of an engine process. Within it, trainers
            on the same GPUs are offloaded.
    """

    policies: Sequence[str]
    model: Path
    config: EngineConfig
    log_folder: Path
    trained: bool
    version: int = 0
    adapters: Sequence[AdapterShape] = ()
    threads: int = 1
    bf16: bool = False
    weights_folder: Path | None = None
    placements: Sequence[Mapping[str, Any]] | None = None
    multi_node: bool = False
    shares_gpus: bool = False
    gpus: Sequence[Sequence[str]] | None = None
    visible_gpus: Sequence[str] = ()
    restart_guard: RestartGuard = field(default=nullcontext)


def build_engines(request: EngineRequest) -> list[Any]:
    """Return an engine for each policy of the request.

    Raises:
        EngineError: the engine does not support the model, or cannot start.
    """
    name = request.config.name
    builder: Any = lookup_import("engine", name, ENGINES)
    if name in ENGINES:
        engines: list[Any] = builder(request)
        return engines
    return [_build_own_engine(builder, request)]


def _build_own_engine(engine_class: Any, request: EngineRequest) -> Any:
    """Call an engine class of the user's own; it gets a placement in a training only."""
    keywords: dict[str, Any] = {
        "rows": request.config.slots,
        "max_length": request.config.max_length,
    }
    if request.placements:
        keywords["place"] = request.placements[0]
    return engine_class(str(request.model), **keywords)
