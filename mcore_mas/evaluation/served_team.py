"""Backend of the gateway that answers calls with a whole team, or with one of its agents."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_mas.evaluation.unscored_env import UNKNOWN_ANSWERS, UnscoredEnv
from retrieval.encoder import Encoder
from rollout.base.errors import Defect, PromptTooLong
from rollout.base.terminal import say
from rollout.gateway.calls import GatewayCall
from rollout.gateway.dialects import ChatReply, ChatRequest
from rollout.gateway.errors import GatewayError
from rollout.gateway.sessions import GatewaySession
from rollout.records.trajectory import Task
from rollout.teams.collect import Collector
from rollout.teams.episode import Episode
from rollout.teams.roles import Agent
from rollout.teams.team import TeamSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeam:
    """Team that answers calls independently: no call depends on earlier ones.

    Attributes:
        name: model name of the whole team.
        aliases: agents, or the whole team, by further model names.
        encoder: encoder of the run's retriever, or None.
        env: name of the environment.
        collector: its team, environment and orchestra play the calls.
    """

    name: str
    env: str
    collector: Collector
    aliases: Mapping[str, str] = field(default_factory=dict)
    encoder: Encoder | None = None
    _encoder_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _noted: set[str] = field(default_factory=set, init=False)
    _call_numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)

    @property
    def models(self) -> list[str]:
        """Model names: that of the whole team, its agents, and the aliases."""
        return [self.name, *self.collector.team.agents, *self.aliases]

    def agent(self, model: str) -> Agent | None:
        """Return the agent with a model name, or None for the whole team.

        Raises:
            GatewayError: there is no such model.
        """
        if model not in self.models:
            message = f"no model '{model[:80]}'; the models here: {', '.join(self.models)}"
            raise GatewayError(404, message, "model_not_found")
        return self.collector.team.agents.get(self.aliases.get(model, model))

    async def start_call(self, request: ChatRequest) -> GatewayCall:
        """Start the reply of the team, or of one of its agents.

        Raises:
            GatewayError: there is no such model.
        """
        agent = self.agent(request.model)
        self._note_unheeded(request)
        if agent is not None:
            return await self._gateway_session(request.seed).start_call(request)
        reply = ChatReply(id=str(next(self._call_numbers)), model=request.model)
        call = GatewayCall(partial_reply=reply)
        return call.start(self._reply_of_team(request, reply))

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of a call to an agent.

        Raises:
            GatewayError: the call is to the whole team, or there is no such model.
        """
        if self.agent(request.model) is None:
            raise GatewayError(
                400,
                f"'{self.name}' is a whole team, whose prompts are only known when it plays; ask "
                "for one of its agents",
            )
        return await self._gateway_session(None).count_tokens(request)

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of texts, encoded as passages.

        Raises:
            GatewayError: the run has no retriever with an encoder.
        """
        if self.encoder is None:
            raise GatewayError(
                404, f"'{self.name}' has no retriever with an encoder, so there are no embeddings"
            )
        async with self._encoder_lock:
            return await asyncio.to_thread(self.encoder.encode_passages, texts)

    def stored_reply(self, reply_id: str) -> ChatReply:
        """Raise GatewayError, because no reply is stored."""
        raise GatewayError(
            404, f"there is no response '{reply_id[:80]}': a served team stores no replies"
        )

    def abandon(self, call: GatewayCall) -> None:
        """Cancel a call whose reply nobody waits for."""
        call.task.cancel()

    def note_refusal(self, error: GatewayError) -> None:
        """Do nothing: the caller gets the error, and no trajectory depends on it."""

    def _note_unheeded(self, request: ChatRequest) -> None:
        """Print a line about fields that are ignored and that no earlier call had."""
        names = set(request.unheeded) - self._noted
        if names:
            self._noted.update(names)
            say(f"ignored in calls: {', '.join(sorted(names))} (docs/gateway.md)")

    def _team_session(self, seed: int | None) -> TeamSession:
        """Return a session with this seed; None: a random one, so that equal calls differ."""
        if seed is None:
            seed = secrets.randbits(63)
        return self.collector.team.session("served", seed)

    def _gateway_session(self, seed: int | None) -> GatewaySession:
        session = self._team_session(seed)
        return GatewaySession(session, aliases=self.aliases, honor_sampling=True)

    async def _reply_of_team(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        """Let the team play the call's messages as a task; return its latest action as the reply.

        The agents sample as the config says: `temperature`, `top_p`, `max_tokens` and `logprobs` of
        the call have no effect.

        Args:
            request: the call.
            reply: reply without text.

        Raises:
            GatewayError: the call has tools, no text, or refers to an earlier reply; or the team
                fails.
            PromptTooLong: a prompt of the team leaves no room for a reply.
        """
        task = self._make_task(request, f"served-{reply.id}")
        env = UnscoredEnv(self.collector.make_env(task))
        session = self._team_session(request.seed)
        episode = Episode(task, session, lambda _: env, self.collector.orchestra)
        await episode.play()
        if isinstance(episode.failure, PromptTooLong):
            raise episode.failure
        if episode.error or env.latest_action is None:
            # The latest action of a failed team may be a search or a move instead of an answer.
            say(f"{self.name}: call {reply.id} failed: {episode.error}")
            status = 500 if isinstance(episode.failure, Defect) else 503
            raise GatewayError(status, f"the team came to no answer: {episode.error}")
        text, stop = request.cut_at_stop(env.latest_action)
        return replace(
            reply,
            text=text,
            finish="stop_sequence" if stop else "stop",
            stop_sequence=stop,
            prompt_tokens=sum(len(turn.prompt_ids) for turn in session.turns),
            completion_tokens=sum(len(turn.completion_ids) for turn in session.turns),
        )

    def _make_task(self, request: ChatRequest, task_id: str) -> Task:
        """Convert the messages of a call to a task; see `_reply_of_team` for errors."""
        if request.tools:
            raise GatewayError(
                400, f"'{self.name}' is a whole team, which takes no tools; its agents do"
            )
        if request.previous_id:
            raise GatewayError(
                404,
                f"no response '{request.previous_id[:80]}': each call of a whole team stands by "
                "itself",
            )
        messages = request.messages
        if not any(message.text for message in messages):
            raise GatewayError(
                400, f"'{self.name}' is a whole team, which needs a problem; there is no text"
            )
        if len(messages) == 1:
            prompt = messages[0].text
        else:
            prompt = "\n\n".join(f"{message.role}: {message.text}" for message in messages)
        if request.reply_format is not None:
            prompt = f"{prompt}\n\n{request.reply_format.instruction}"
        return Task(
            id=task_id,
            prompt=prompt,
            answers=UNKNOWN_ANSWERS,
            env=self.env,
            source="served",
            split="test",
        )
