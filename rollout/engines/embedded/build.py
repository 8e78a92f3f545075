"""Embedded engines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout.engines.adapters import adapter_engines
from rollout.engines.build import EngineRequest
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.engine import HostedEngine
from rollout.engines.embedded.gpu_decoder import make_decoder
from rollout.engines.embedded.local import LocalEngine, LocalReplicas
from rollout.engines.embedded.replicas import ReplicatedEngine
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.engines.registry import TRANSPORTS
from rollout.models.grammars import Grammars


def build_embedded_engines(request: EngineRequest) -> list[Any]:
    """Return an embedded engine for each policy of a request; trained ones run in Ray actors."""
    if not request.trained:
        return [build_local_engine(request, local_devices(request))]

    settings = embedded_settings(request)
    if request.adapters:
        host = HostedEngine(settings, adapters=request.adapters)
        return list(adapter_engines(host, len(request.adapters)))
    if request.config.replicas > 1:
        placements = request.placements or [{}] * request.config.replicas
        return [ReplicatedEngine(settings, placements)]
    return [HostedEngine(settings)]


def embedded_settings(request: EngineRequest) -> EmbeddedSettings:
    """Return the settings of an embedded engine that is trained."""
    config = request.config
    weights_folder = request.weights_folder
    # Replicas read new weights from a folder; one engine can take them from shared memory.
    if weights_folder is None and config.replicas > 1:
        weights_folder = (request.log_folder / request.policies[0]).resolve()
    placement = request.placements[0] if request.placements else None
    has_gpu = placement is not None and "num_gpus" in placement
    return EmbeddedSettings(
        folder=request.model,
        max_length=config.max_length,
        rows=config.slots,
        threads=request.threads,
        deterministic=config.deterministic,
        routing=config.router_replay,
        bf16=request.bf16,
        device=_choose_device(config.device, has_gpu=has_gpu),
        placement=placement,
        transport=config.transport or TRANSPORTS["embedded"][0],
        weights_folder=weights_folder,
        restarts=config.restarts,
    )


def build_local_engine(
    request: EngineRequest, devices: Sequence[str]
) -> LocalEngine | LocalReplicas:
    """Return an engine in this process on one device, or replicas on several."""
    first = _load_engine(request, devices[0])
    if len(devices) == 1:
        return LocalEngine(first)
    engines = [first] + [_copy_engine(request, first, device) for device in devices[1:]]
    return LocalReplicas([LocalEngine(engine) for engine in engines])


def local_devices(request: EngineRequest) -> list[str]:
    """Return torch's names of the devices that an embedded engine in this process computes on."""
    if request.gpus is None:
        return [_choose_device(request.config.device, has_gpu=torch.cuda.is_available())]
    if not any(request.gpus):  # the evaluation is on the CPU
        return [_choose_device(request.config.device, has_gpu=False)]
    return [f"cuda:{request.visible_gpus.index(gpu)}" for (gpu,) in request.gpus]


def _choose_device(device: str, *, has_gpu: bool) -> str:
    """Return the torch device for `engine.device`."""
    if device != "auto":
        return device
    return "cuda" if has_gpu else "cpu"


def _load_engine(request: EngineRequest, device: str) -> EmbeddedEngine:
    """Return an engine in this process, with the weights of the model's folder."""
    config = request.config
    return EmbeddedEngine.from_folder(
        request.model,
        max_length=config.max_length,
        device=device,
        bf16=request.bf16,
        rows=config.slots,
        version=request.version,
        deterministic=config.deterministic,
    )


def _copy_engine(request: EngineRequest, engine: EmbeddedEngine, device: str) -> EmbeddedEngine:
    """Return an engine on another device that shares the weights in the host's memory with `engine`."""
    config = request.config
    decoder = make_decoder(
        engine.decoder.shape,
        config.max_length,
        engine.decoder.halves,
        device=device,
        bf16=request.bf16,
    )
    decoder.adopt(engine.decoder.half)
    return EmbeddedEngine(
        decoder,
        rows=config.slots,
        version=request.version,
        deterministic=config.deterministic,
        grammars=Grammars(request.model),
    )
