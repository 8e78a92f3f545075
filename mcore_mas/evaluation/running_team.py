"""Team of a run with its engines, for evaluations, chats and servers, where nothing is trained."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.engine_gpus import assign_engine_gpus, share_gpu_memory
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.engine_factory import close_engines, engine_requests, make_engines
from mcore_mas.runtime.players import make_players, open_remotes
from mcore_mas.runtime.run_environments import open_environments
from rollout.config.agents import build_team
from rollout.teams.collect import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTeam:
    """Team whose engines, remote clients and environments are up.

    Attributes:
        collector: plays tasks with the team.
        runner: runner of the event loop in which the collector must be called.
    """

    collector: Collector
    runner: asyncio.Runner


@contextmanager
def running_team(config: RunConfig, path_prefix: str, step: int) -> Iterator[RunningTeam]:
    """Start the engines and the environments of a team for the block, on all GPUs of the machine.

    Args:
        config: config of the run.
        path_prefix: beginning of all paths that remote models, engines and the retriever write to.
        step: number that is part of the seeds of the trajectories.

    Raises:
        PlacementError: there are fewer GPUs than the engines need.
        RemoteError, RetrievalError: a remote model or the retriever cannot be used.
    """
    gpus = assign_engine_gpus(config)
    config = share_gpu_memory(config, gpus)
    remotes = open_remotes(config, Path(f"{path_prefix}remotes"))
    with hide_gpus_from_cpu_run(config), ExitStack() as stack:
        retriever_log = str(Path(f"{path_prefix}retriever").absolute())
        make_env = stack.enter_context(open_environments(config, retriever_log))
        requests = engine_requests(
            config, config.models, Path(f"{path_prefix}engines"), trained=False, gpus=gpus
        )
        engines = make_engines(requests)
        stack.callback(close_engines, engines)
        runner = stack.enter_context(asyncio.Runner())
        for remote in remotes.values():
            stack.callback(lambda client: runner.run(client.aclose()), remote)

        players = make_players(config, engines, gpus)
        collector = Collector(
            team=build_team(config.agents, {**players, **remotes}),
            make_env=make_env,
            orchestra=config.orchestra.call,
            seed=config.seed,
            step=step,
        )
        yield RunningTeam(collector=collector, runner=runner)
