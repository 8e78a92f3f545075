"""Backend of the gateway that answers calls with a whole team, or with one of its agents."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.base.errors import EnvError, PromptTooLong
from rollout.environments.protocol import Env, Step
from rollout.gateway.calls import GatewayCall
from rollout.gateway.dialects import ChatReply, ChatRequest, GatewayError
from rollout.gateway.sessions import GatewaySession
from rollout.records.trajectory import Task
from rollout.teams.collect import Collector
from rollout.teams.episode import Episode
from rollout.teams.roles import Agent
from rollout.teams.team import TeamSession


class UnscoredEnv:
    """Environment of a task without a known answer, whose actions need not be scored.

    Attributes:
        final_action: latest action of the team; None before the first.
    """

    def __init__(self, env: Env) -> None:
        self.final_action: str | None = None
        self._env = env

    def __getattr__(self, name: str) -> Any:
        # Optional abilities, such as tools, are those of the environment.
        return getattr(self._env, name)

    def reset(self, task: Task) -> str:
        """Return the first observation."""
        return self._env.reset(task)

    async def step(self, action: str) -> Step:
        """Take a step; end the task if the environment cannot score the action."""
        self.final_action = action
        try:
            return await self._env.step(action)
        except EnvError:
            return Step(done=True)

    async def preview(self, action: str) -> Step:
        """Return the step that an action would give; an empty one if it cannot be scored."""
        try:
            step: Step = await self._env.preview(action)  # type: ignore[attr-defined]
            return step
        except EnvError:
            return Step()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeam:
    """Team that answers each call on its own: no call depends on earlier ones.

    Attributes:
        name: model name of the whole team.
        env: name of the environment.
        collector: its team, environment and orchestra play the calls.
    """

    name: str
    env: str
    collector: Collector
    _call_numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)

    @property
    def models(self) -> list[str]:
        """Model names: that of the whole team, and its agents."""
        return [self.name, *self.collector.team.agents]

    def agent(self, model: str) -> Agent | None:
        """Return the agent with a model name, or None for the whole team.

        Raises:
            GatewayError: there is no such model.
        """
        if model not in self.models:
            message = f"no model '{model[:80]}'; the models here: {', '.join(self.models)}"
            raise GatewayError(404, message, "model_not_found")
        return self.collector.team.agents.get(model)

    async def start_call(self, request: ChatRequest) -> GatewayCall:
        """Start the reply of the team, or of one of its agents.

        Raises:
            GatewayError: there is no such model.
        """
        if self.agent(request.model) is not None:
            return await self._gateway_session().start_call(request)
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
        return await self._gateway_session().count_tokens(request)

    def abandon(self, call: GatewayCall) -> None:
        """Cancel a call whose reply nobody waits for."""
        call.task.cancel()

    def note_refusal(self, error: GatewayError) -> None:
        """Do nothing: the caller gets the error, and no trajectory depends on it."""

    def _team_session(self) -> TeamSession:
        """Return a session with a random seed: the same call again gives another sample."""
        return self.collector.team.session("served", secrets.randbits(63))

    def _gateway_session(self) -> GatewaySession:
        return GatewaySession(self._team_session(), honor_sampling=True)

    async def _reply_of_team(self, request: ChatRequest, reply: ChatReply) -> ChatReply:
        """Play the call's messages as a task; return its final action as the reply.

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
        session = self._team_session()
        episode = Episode(task, session, lambda _: env, self.collector.orchestra)
        await episode.play()
        if isinstance(episode.failure, PromptTooLong):
            raise episode.failure
        if env.final_action is None:
            raise GatewayError(503, f"the team came to no answer: {episode.error}")
        text, stop = request.cut_at_stop(env.final_action)
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
        return Task(
            id=task_id, prompt=prompt, answers=(), env=self.env, source="served", split="test"
        )
