"""Team of a run with its engines, for evaluations, chats and servers, where nothing is trained."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.engine_gpus import assign_engine_gpus, share_gpu_memory
from mcore_mas.evaluation.server_nodes import place_servers
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.planning.worker_groups import evaluates_on_all_nodes
from mcore_mas.runtime.cluster import joined_ray
from mcore_mas.runtime.engine_factory import close_engines, engine_requests, make_engines
from mcore_mas.runtime.players import make_players, open_remotes
from mcore_mas.runtime.run_environments import open_environments
from rollout.config.agents import build_team
from rollout.engines.build import EngineRequest
from rollout.teams.collect import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTeam:
    """Team whose engines, remote clients and environments are up.

    Attributes:
        collector: plays tasks with the team.
        runner: runner of the event loop in which the collector must be called.
        servers: number of engines and of their replicas.
    """

    collector: Collector
    runner: asyncio.Runner
    servers: int


@contextmanager
def running_team(
    config: RunConfig, path_prefix: str, step: int, address: str = "local"
) -> Iterator[RunningTeam]:
    """Start the engines and the environments of a team for the block.

    The engines use all GPUs of this machine but that of the retriever. If `address` names a Ray
    cluster, and all engines are SGLang servers that are started here, they use the GPUs of all its
    nodes.

    Args:
        config: config of the run.
        path_prefix: prefix of the paths to which remote models, engines and the retriever write.
        step: number that is part of the seeds of the trajectories.
        address: address of a running Ray; "local": this machine.

    Raises:
        ClusterError: the Ray cannot be joined.
        PlacementError: there are fewer GPUs than the engines need.
        RemoteError, RetrievalError: a remote model or the retriever cannot be used.
    """
    remotes = open_remotes(config, Path(f"{path_prefix}remotes"))
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        # The clients are closed even if an engine does not start, so that a further call can open
        # their records of replies.
        runner = stack.enter_context(asyncio.Runner())
        for remote in remotes.values():
            stack.callback(lambda client: runner.run(client.aclose()), remote)

        retriever_log = str(Path(f"{path_prefix}retriever").absolute())
        make_env = stack.enter_context(open_environments(config, retriever_log))
        log_folder = Path(f"{path_prefix}engines")
        if address != "local" and evaluates_on_all_nodes(config):
            requests = stack.enter_context(_requests_on_nodes(config, log_folder, address))
        else:
            requests = _requests_on_machine(config, log_folder)
        engines = make_engines(requests)
        stack.callback(close_engines, engines)

        servers: dict[str, int] = {}  # by policy
        for request in requests:  # each policy has an engine of its own
            servers |= dict.fromkeys(request.policies, _server_count(request))
        players = make_players(config, engines, servers)
        collector = Collector(
            team=build_team(config.agents, {**players, **remotes}),
            make_env=make_env,
            orchestra=config.orchestra.call,
            seed=config.seed,
            step=step,
        )
        yield RunningTeam(collector=collector, runner=runner, servers=sum(servers.values()))


def _requests_on_machine(config: RunConfig, log_folder: Path) -> list[EngineRequest]:
    """Return requests of engines on all GPUs of this machine."""
    gpus = assign_engine_gpus(config)
    config = share_gpu_memory(config, gpus)
    return engine_requests(config, config.models, log_folder, trained=False, gpus=gpus)


@contextmanager
def _requests_on_nodes(
    config: RunConfig, log_folder: Path, address: str
) -> Iterator[list[EngineRequest]]:
    """Join a Ray for the block; yield requests of servers on all GPUs of its nodes."""
    log_folder.mkdir(parents=True, exist_ok=True)
    file = log_folder / "nodes.txt"  # by which `joined_ray` checks that every node sees the folder
    file.write_text(f"{os.getpid()} of {socket.gethostname()}")
    with joined_ray(address, file) as nodes:
        placements = place_servers(config, nodes).options
        yield engine_requests(
            config,
            config.models,
            log_folder,
            trained=False,
            placements={policy: placements[policy, "engine"] for policy in config.models},
            nodes=len(nodes),
        )


def _server_count(request: EngineRequest) -> int:
    """Return the number of servers or replicas of an engine in an evaluation."""
    if request.config.name != "sglang" and not any(request.gpus or ()):
        return 1  # without GPUs, an engine in this process has no replicas
    if request.gpus is not None:  # on this machine
        return len(request.gpus)
    # On the nodes of a Ray cluster, where a server has `tp` placements.
    assert request.placements is not None
    return len(request.placements) // request.config.tp
