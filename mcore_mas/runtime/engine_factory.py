"""Engines of a run's policies, made from its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from mcore_mas.config.policy import policies_on_base
from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.planning.machine import visible_gpu_ids
from rollout.base.json_files import read_record
from rollout.engines.build import EngineRequest, RestartGuard, build_engines
from rollout.models.adapter_weights import AdapterShape


def make_engines(requests: Iterable[EngineRequest]) -> dict[str, Any]:
    """Start the requested engines; return the engine of each policy.

    Ray must be running if trainers send weights to an engine.

    Raises:
        EngineError: an engine does not support its model, or cannot start.
    """
    engines: dict[str, Any] = {}
    for request in requests:
        engines.update(zip(request.policies, build_engines(request), strict=True))
    return engines


def engine_requests(
    config: RunConfig,
    models: Mapping[str, str | Path],
    log_folder: Path,
    *,
    trained: bool,
    placements: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    nodes: int | None = None,
    gpus: Mapping[str, Sequence[Sequence[str]]] | None = None,
    restart_guard: RestartGuard = nullcontext,
) -> list[EngineRequest]:
    """Return a request for each engine of a run.

    One engine may serve the adapters of several policies.

    Args:
        config: config of the run.
        models: Hugging Face folder by policy.
        log_folder: folder of the servers' logs.
        trained: True if trainers send weights.
        placements: Ray actor options of each device of an engine, by policy.
        nodes: number of nodes of a Ray that was joined; None if the run has its own Ray.
        gpus: GPUs of each server or replica in an evaluation, by policy.
        restart_guard: see `EngineRequest`.
    """
    requests: list[EngineRequest] = []
    requested: set[str] = set()
    for policy, model in models.items():
        if policy in requested:
            continue  # the engine of an earlier policy has the adapter of this one
        policies = _policies_of_engine(config, policy, trained=trained)
        requested.update(policies)
        engine = for_policy(config, policy).engine
        has_adapters = trained and _holds_adapters(config, policy)

        weights_folder = None
        if engine.weights_folder:
            weights_folder = engine.weights_folder / config.run / policy
        if nodes is not None:  # trainers and servers may be on different nodes
            weights_folder = (weights_folder or log_folder / policy).resolve()

        engine_placements = placements.get(policy) if placements else None
        # In an evaluation, servers that Ray places have GPUs of their own.
        shares_gpus = bool(engine_placements) and trained and config.cluster.pool == "shared"
        if gpus is not None:
            shares_gpus = _shares_gpus(policy, gpus)

        requests.append(
            EngineRequest(
                policies=policies,
                model=Path(model),
                config=engine,
                log_folder=log_folder,
                trained=trained,
                version=0 if trained else _trained_steps(model),
                adapters=_adapter_shapes(config, policies) if has_adapters else (),
                threads=config.cluster.threads_per_process or 1,
                bf16=config.policies[policy].bf16,
                weights_folder=weights_folder,
                placements=engine_placements,
                multi_node=nodes is not None and nodes > 1,
                shares_gpus=shares_gpus,
                gpus=gpus[policy] if gpus is not None else None,
                visible_gpus=visible_gpu_ids() if gpus is not None else (),
                restart_guard=restart_guard,
            )
        )
    return requests


def close_engines(engines: Mapping[str, Any]) -> None:
    """End the processes of the engines."""
    for engine in engines.values():
        if hasattr(engine, "close"):
            engine.close()


def _holds_adapters(config: RunConfig, policy: str) -> bool:
    """Return True if a trained policy's engine takes adapters and keeps their base model frozen."""
    engine = for_policy(config, policy).engine
    if engine.adapters == "slots":
        return policy in config.trained
    return engine.name == "embedded" and config.policies[policy].share_base


def _policies_of_engine(config: RunConfig, policy: str, *, trained: bool) -> Sequence[str]:
    """Return the policies whose adapters are in the engine of this policy, or only this one."""
    if trained and _holds_adapters(config, policy):
        return policies_on_base(config.policies, policy)
    return [policy]


def _adapter_shapes(config: RunConfig, policies: Sequence[str]) -> list[AdapterShape]:
    shapes = []
    for policy in policies:
        lora = config.policies[policy].lora
        assert lora is not None
        shapes.append(AdapterShape(rank=lora.rank, scale=lora.scale, targets=lora.targets))
    return shapes


def _shares_gpus(policy: str, gpus: Mapping[str, Sequence[Sequence[str]]]) -> bool:
    """Return True if another server uses a GPU of this policy's servers."""
    servers_by_gpu: Counter[str] = Counter()
    for servers in gpus.values():
        for server_gpus in servers:
            servers_by_gpu.update(server_gpus)
    return any(servers_by_gpu[gpu] > 1 for gpu in chain.from_iterable(gpus[policy]))


def _trained_steps(model: str | Path) -> int:
    """Return the number of steps that a model was trained for; 0 if no training wrote it.

    Trainings write models to `train/models/` and their record to `train/done.json`.
    """
    file = Path(model).parent.parent / "done.json"
    if not file.is_file():
        return 0
    record = read_record(file)
    if Path(model).name not in record.get("sha256", {}):
        return 0
    return int(record.get("policies_of_step", 0))
