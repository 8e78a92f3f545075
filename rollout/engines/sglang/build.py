"""SGLang engines of a run."""

from __future__ import annotations

from typing import Any

from retrieval.regular_files import read_regular_text
from rollout.engines.adapters import adapter_engines
from rollout.engines.build import EngineRequest
from rollout.engines.registry import TRANSPORTS
from rollout.engines.sglang.adapters import AdapterServers
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.settings import SGLangSettings


def build_sglang_engines(request: EngineRequest) -> list[Any]:
    """Return the SGLang engines of a request; their servers start with the first call."""
    settings = sglang_settings(request)
    if request.adapters:
        host = AdapterServers(settings, restart_guard=request.restart_guard)
        return list(adapter_engines(host, len(request.adapters)))
    return [SGLangEngine(settings, restart_guard=request.restart_guard)]


def _server_count(request: EngineRequest) -> int:
    """Return the number of servers.

    An evaluation has a server for each group of GPUs that it was assigned or, if Ray has placed GPUs
    for it, one for every `tp` of these. In other cases the number is `replicas` of the config.
    """
    if request.gpus is not None:
        return len(request.gpus)
    if request.placements and not request.trained:
        return len(request.placements) // request.config.tp
    return request.config.replicas


def sglang_settings(request: EngineRequest) -> SGLangSettings:
    """Return the settings of the SGLang engine of a request."""
    config = request.config
    options: dict[str, Any] = {"enable-deterministic-inference": config.deterministic}
    if request.trained and config.sleep and config.options.get("device") != "cpu":
        options["enable-memory-saver"] = True  # without it, a server gives no memory back
    options |= config.options
    return SGLangSettings(
        folder=request.model,
        max_length=config.max_length,
        rows=config.slots,
        version=request.version,
        threads=request.threads,
        python=str(config.python) if config.python else None,
        urls=config.urls,
        key=read_regular_text(config.key_file).strip() if config.key_file else None,
        multi_node=request.multi_node,
        members=config.members,
        replicas=_server_count(request),
        tp=config.tp,
        transport=config.transport or TRANSPORTS["sglang"][0],
        weights_folder=request.weights_folder,
        placements=request.placements,
        gpus=request.gpus or (),
        shares_gpus=request.shares_gpus,
        options=options,
        environment=config.environment,
        compare_servers=config.compare_servers,
        routing=request.trained and config.router_replay,
        grammar=config.grammar,
        adapters=request.adapters,
        restarts=config.restarts,
        start_s=config.start_deadline_s(request.model),
        timeout_s=config.request_deadline_s,
        log=request.log_folder / f"{request.policies[0]}.log",
    )
