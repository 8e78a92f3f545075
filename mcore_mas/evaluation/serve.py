"""Serving of a run: its agents, and the whole team behind one name, as models of the APIs that the gateway speaks."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.requests import Request

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation.evaluate import playing, seated
from rollout.base.errors import EnvError, PromptTooLong
from rollout.base.files import ensure_writable
from rollout.base.http_server import has_token, listen, listener_url, server_config
from rollout.base.ownership import owned
from rollout.base.processes import say
from rollout.environments.protocol import Env, Step
from rollout.gateway.app import GatewayHandlers, gateway_app
from rollout.gateway.dialects import ChatReply, ChatRequest, GatewayError
from rollout.gateway.sessions import GatewayCall, GatewaySession
from rollout.records.trajectory import Task
from rollout.teams.collect import Collector
from rollout.teams.episode import Episode
from rollout.teams.roles import Agent

_DRAIN_S = 10


class HandedIn:
    """An environment of a task whose answer nobody knows: what the team hands in is kept, and need not be scored."""

    def __init__(self, env: Env) -> None:
        self.handed_in: str | None = None
        self._env = env

    def __getattr__(self, name: str) -> Any:  # the abilities that the environment has, and no other
        return getattr(self._env, name)

    def reset(self, task: Task) -> str:
        return self._env.reset(task)

    async def step(self, action: str) -> Step:
        self.handed_in = action
        try:
            return await self._env.step(action)
        except EnvError:
            return Step(done=True)

    async def preview(self, action: str) -> Step:
        try:
            found: Step = await self._env.preview(action)  # type: ignore[attr-defined]
            return found
        except EnvError:
            return Step()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeam:
    """A team that answers each call by itself, under the run's name: there are no trajectories that outlive one."""

    config: RunConfig
    collector: Collector  # of its team at its environments
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def models(self) -> list[str]:
        """The whole team and its agents."""
        return [self.config.run, *self.collector.team.agents]

    def agent(self, model: str) -> Agent | None:
        """Who answers as `model`, None: the whole team; GatewayError if nobody does."""
        if model not in self.models:
            known = ", ".join(self.models)
            raise GatewayError(
                404, f"no model '{model[:80]}'; the models here: {known}", "model_not_found"
            )
        return self.collector.team.agents.get(model)

    async def start_call(self, asked: ChatRequest) -> GatewayCall:
        """Have the team, or one of its agents, reply.

        Raises:
            GatewayError: nobody can.
        """
        if self.agent(asked.model) is None:
            call = GatewayCall(
                partial_reply=ChatReply(id=str(next(self.numbers)), model=asked.model)
            )
            return call.start(self._play(asked, call.partial_reply))
        return await GatewaySession(self._seat(), honor_sampling=True).start_call(asked)

    async def count_tokens(self, asked: ChatRequest) -> int:
        """How many tokens an agent would be asked with; GatewayError if nobody can say."""
        if self.agent(asked.model) is None:
            raise GatewayError(
                400,
                f"'{self.config.run}' is a whole team, which reads as it plays; its agents can say",
            )
        return await GatewaySession(self._seat(), honor_sampling=True).count_tokens(asked)

    def abandon(self, call: GatewayCall) -> None:
        """Nobody waits for the reply any more: it is given up."""
        call.task.cancel()

    def _seat(self) -> Any:
        return self.collector.team.session(
            "served", secrets.randbits(63)
        )  # the same call again is another sample

    async def _play(self, asked: ChatRequest, head: ChatReply) -> ChatReply:
        if asked.tools:
            raise GatewayError(
                400, f"'{self.config.run}' is a whole team, which takes no tools; its agents do"
            )
        if asked.previous_id:
            raise GatewayError(
                404,
                f"no response '{asked.previous_id[:80]}': each call of a whole team stands by itself",
            )
        texts = [message.text for message in asked.messages]
        if not any(texts):
            raise GatewayError(
                400, f"'{self.config.run}' is a whole team, which needs a problem; there is no text"
            )
        said = texts if len(texts) == 1 else [f"{m.role}: {m.text}" for m in asked.messages]
        task = Task(
            id=f"served-{head.id}",
            prompt="\n\n".join(said),
            answers=(),
            env=self.config.env.name,
            source="served",
            split="test",
        )
        env, seat = HandedIn(self.collector.make_env(task)), self._seat()
        episode = Episode(task, seat, lambda _: env, self.collector.orchestra)
        await episode.play()
        if isinstance(episode.failure, PromptTooLong):
            raise episode.failure
        if env.handed_in is None:
            raise GatewayError(503, f"the team came to no answer: {episode.error}")
        text, stop = asked.cut_at_stop(env.handed_in)
        return replace(
            head,
            text=text,
            finish="stop_sequence" if stop else "stop",
            stop_sequence=stop,
            prompt_tokens=sum(len(turn.prompt_ids) for turn in seat.turns),
            completion_tokens=sum(len(turn.completion_ids) for turn in seat.turns),
        )


def serve(
    run: Path,
    *,
    state: str,
    host: str,
    port: int,
    token_file: Path | None,
    most_calls: int,
    most_connections: int,
) -> None:
    """Answer for the team of the run in folder `run` until interrupted; a line says where.

    Args:
        state: `base` or `trained`, of its policies.
        token_file: has a bearer token; needed for a host that is not loopback.
        most_calls: answered at a time.
        most_connections: open at a time; while there are more, calls are answered with status 503.

    Raises:
        ConfigError: the run cannot be used.
        ListenError: the token cannot be used, or nobody may listen there.
        FolderError: the run has not finished its training, or is served already.
    """
    config = seated(RunConfig.load(run / "config.yaml"), state)
    if config.run in config.agents:
        raise ConfigError(f"{run}: an agent has the name of the run, which is the whole team's")
    listener, token = listen(host, port, token_file)
    torch.set_num_threads(config.cluster.threads_per_process or 1)
    folder = ensure_writable(config.folder / "served")
    with owned(folder), playing(config, f"{folder}/") as (collector, runner):
        served = ServedTeam(config=config, collector=collector)

        def find(request: Request) -> ServedTeam:
            if token is not None and not has_token(request, token):
                raise GatewayError(401, "a bearer token is required")
            return served

        app = gateway_app(GatewayHandlers(find, most_calls), "")
        url = listener_url(listener)
        say(f"{', '.join(served.models)} at {url}/v1 (Anthropic: {url}); Ctrl-C ends it")
        server = uvicorn.Server(
            server_config(app, drain_s=_DRAIN_S, lifespan=False, max_connections=most_connections)
        )
        runner.run(server.serve(sockets=[listener]))
