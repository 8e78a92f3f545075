"""Server of a run: its agents, and the whole team, as models of the gateway's APIs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import uvicorn
from starlette.requests import Request

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation.running_team import running_team
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.evaluation.served_team import ServedTeam
from retrieval.encoder import Encoder
from rollout.base.files import ensure_writable
from rollout.base.http_server import has_token, listen, listener_url, server_config
from rollout.base.ownership import owned
from rollout.base.terminal import say
from rollout.config.retriever import RetrieverConfig
from rollout.gateway.app import GatewayHandlers, gateway_app
from rollout.gateway.errors import GatewayError
from rollout.records.trajectory import CHAT_STEP

# Seconds that calls in progress get when the server stops.
_DRAIN_S = 10


def serve(
    run: Path,
    *,
    state: str,
    host: str,
    port: int,
    token_file: Path | None,
    max_calls: int,
    max_connections: int,
    aliases: Mapping[str, str],
) -> None:
    """Serve the team of a run until interrupted; print one line with the URL.

    Args:
        run: folder of the run.
        state: "base" or "trained": the state of the run's policies.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        token_file: file with the bearer token that calls must carry; required unless `host` is
            loopback.
        max_calls: number of calls that are answered at a time.
        max_connections: number of open connections; while there are more, calls are answered with
            status 503.
        aliases: agents, or the whole team, by further model names.

    Raises:
        ConfigError: the run or an alias cannot be used.
        ListenError: the token cannot be used, or the address is taken or not allowed.
        FolderError: the run has not finished its training, or another process serves it.
        PlacementError: there are fewer GPUs than the engines need.
    """
    config = config_with_seats(RunConfig.load(run / "config.yaml"), state)
    if config.run in config.agents:
        raise ConfigError(
            f"{run}: an agent has the name of the run, under which the whole team answers; rename one of them"
        )
    check_aliases(aliases, [config.run, *config.agents])
    listener, token = listen(host, port, token_file)
    torch.set_num_threads(config.cluster.threads_per_process or 1)
    folder = ensure_writable(config.folder / "served")
    with owned(folder), running_team(config, f"{folder}/", CHAT_STEP) as team:
        served = ServedTeam(
            name=config.run,
            env=config.env.name,
            collector=team.collector,
            aliases=aliases,
            encoder=_load_encoder(config.retriever),
        )

        def find_backend(request: Request) -> ServedTeam:
            if token is not None and not has_token(request, token):
                raise GatewayError(401, "a bearer token is required")
            return served

        app = gateway_app(GatewayHandlers(find_backend, max_calls), "")
        url = listener_url(listener)
        say(f"{', '.join(served.models)} at {url}/v1 (Anthropic: {url}); Ctrl-C ends it")
        server = uvicorn.Server(
            server_config(app, drain_s=_DRAIN_S, lifespan=False, max_connections=max_connections)
        )
        team.runner.run(server.serve(sockets=[listener]))


def _load_encoder(retriever: RetrieverConfig | None) -> Encoder | None:
    """Return the encoder of the run's retriever; None if it has none, or if the retriever runs elsewhere."""
    if retriever is None or retriever.urls or retriever.ranking == "bm25":
        return None
    return Encoder.of(retriever.encoder, retriever.encoder_folder)


def check_aliases(aliases: Mapping[str, str], models: Sequence[str]) -> None:
    """Raise ConfigError if an alias stands for no model, or has the name of one."""
    for alias, model in aliases.items():
        if model not in models:
            raise ConfigError(
                f"--alias {alias}={model}: there is no model '{model}'; models: {', '.join(models)}"
            )
        if alias in models:
            raise ConfigError(f"--alias {alias}={model}: '{alias}' is a model of the run already")
