"""Teams of agents: who can act, and the multi-turn session of one trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from rollout.base.async_tasks import cancel_tasks
from rollout.base.deadlines import Late, LateCall
from rollout.base.errors import Defect, EngineError, EnvError, PromptTooLong, Unusable
from rollout.engines import ChatState, PolicyClient, PolicyReply
from rollout.engines.client import prompt_tokens
from rollout.environments.tools import Tool
from rollout.models.tool_calls import parse_reply
from rollout.records.call_record import CallRecord
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Message, Turn
from rollout.teams.chat import Chat, ToolRunner
from rollout.teams.roles import Agent, AgentReply

TurnReply = tuple[Turn, AgentReply]  # what is written down, and what the orchestra gets


@dataclass(slots=True)
class Blamed:  # made of a generator it would take several times longer, three times a turn
    """Anything but a failure that is expected is a Defect of `what`: it fails one trajectory, not the run.

    `sys.exit` too, which else ends the event loop of all.
    """

    what: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        expected = isinstance(error, (EngineError, EnvError, Late, Unusable))
        if isinstance(error, (Exception, SystemExit)) and not expected:
            raise Defect(f"{self.what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An agent that is asked for a turn."""

    index: int  # of the turn
    agent: Agent
    messages: tuple[Message, ...]
    state_key: str  # digest of the messages
    anchor: str = ""  # digest of the environment's state, "" where it names none
    chat: ChatState | None = None  # None: the agent is asked once

    def __str__(self) -> str:
        return f"{self.agent.name} (turn {self.index})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A reply of a policy, and the messages that it answers."""

    messages: tuple[Message, ...]
    reply: PolicyReply


@dataclass(frozen=True, slots=True)
class Team:
    """Who can act, shared by all trajectories of a run."""

    agents: Mapping[str, Agent]
    players: Mapping[str, PolicyClient]  # by policy

    def seat(self, *place: int | str, calls: CallRecord | None = None) -> TeamSession:
        """Return the team's session of one trajectory.

        Args:
            place: where in the run the trajectory happens, from which the seeds of its sampling are derived.
            calls: record of the trajectory's calls that must not be repeated.
        """
        return TeamSession(self, place, calls)

    def resampled(self, **sampling: float) -> Team:
        """The same team with fields of every agent's `Sampling` replaced; a temperature of 0 is greedy."""
        if not sampling:
            return self
        agents = {
            name: replace(agent, sampling=replace(agent.sampling, **sampling))  # type: ignore[arg-type]
            for name, agent in self.agents.items()
        }
        return replace(self, agents=agents)


class TeamSession:
    """A team in one trajectory: `act` asks one agent, `chat` opens a conversation; every reply is written down."""

    def __init__(
        self, team: Team, place: tuple[int | str, ...], calls: CallRecord | None = None
    ) -> None:
        self.calls = calls or CallRecord()  # of tools and environments that act outside the run
        self.replies: dict[int, RecordedReply] = {}  # of policies, by the seed of the call
        # which task of this trajectory waits for what, and since when on the event loop's clock, in seconds
        self.waiting: dict[asyncio.Future[Any], tuple[object, float]] = {}
        self.state = ""  # of the environment, where it names one
        self.leaf = ""  # node at which a tree of the orchestra's own ended
        self._team = team
        self._place, self._session = place, "/".join(map(str, place))
        self.tools: dict[
            str, Sequence[Tool]
        ] = {}  # by agent, those that are open for this trajectory
        # makes a call of a tool; an episode times it and writes it down
        self.run_tool: ToolRunner = lambda name, call, turn: call()
        self._chats: Counter[str] = Counter()  # by agent, how many it has
        self._calls: Counter[str] = Counter()  # by agent, of tools
        self._asked = 0
        self._turns: dict[int, Turn] = {}
        self.scores: dict[int, dict[str, float]] = {}  # by turn
        self._rounds: dict[int, int] = {}  # by turn
        self._by_task: dict[
            object, int
        ] = {}  # the latest turn that each task of this trajectory asked for
        self._recent: list[int] = []  # the turns that the environment's next step belongs to
        self._round = 0  # environment steps so far that turns came after
        self._stepped = False  # whether it has stepped since the last of them
        self.closed = False  # it has ended: no task of it may wait any more

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far with their scores, in the order in which they were asked for."""
        return tuple(
            replace(turn, round=self._rounds[index], scores=self.scores[index])
            for index, turn in sorted(self._turns.items())
        )

    @property
    def last(self) -> Turn | None:
        """The latest turn."""
        return self._turns[max(self._turns)] if self._turns else None

    @property
    def own(self) -> Turn | None:
        """The latest turn that the running task asked for; the latest of all if it asked for none."""
        index = self._by_task.get(asyncio.current_task())
        return self.last if index is None else self._turns[index]

    def turn(self, index: int) -> Turn:
        """The turn of that number."""
        return self._turns[index]

    @property
    def agents(self) -> Collection[Agent]:
        """Who can act."""
        return self._team.agents.values()

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        """Ask agent `name`, with its user template's slots filled by `slots`.

        Raises:
            KeyError: the team has no such agent, or its template has a slot that was not given.
            EngineError: the engine could not answer.
            Defect: the engine or the role's parser raised something else.
        """
        agent = self._team.agents[name]
        return (await self.take_turn(agent, agent.role.messages(**slots)))[1]

    def chat(
        self, name: str, /, *, system: str | None = None, tools: Sequence[Tool] | None = None
    ) -> Chat:
        """Open a chat of agent `name`, one of several that it may have.

        Args:
            system: its system prompt; None: the role's.
            tools: that it may call; None: those that the config gives to the agent.

        Raises:
            KeyError: the team has no such agent.
        """
        agent = self._team.agents[name]
        own = self.tools.get(name, ()) if tools is None else tools
        return Chat(
            self, agent, self.chat_id(name), agent.role.system if system is None else system, own
        )

    def chat_id(self, agent: str) -> str:
        """The id of a new chat of an agent."""
        self._chats[agent] += 1
        return f"{agent}/{self._chats[agent] - 1}"

    async def take_turn(
        self, agent: Agent, messages: tuple[Message, ...], chat: ChatState | None = None
    ) -> TurnReply:
        """Have an agent go on after `messages`, in its `chat` or once, and write the turn down.

        Raises:
            EngineError: the engine could not answer; `PromptTooLong` that there is no room for the reply.
        """
        key = _digest(messages)
        anchor = _digest((Message(role="state", content=self.state),)) if self.state else ""
        call = Call(
            index=self._asked,
            agent=agent,
            messages=messages,
            state_key=key,
            anchor=anchor,
            chat=chat,
        )
        self._asked += 1
        try:
            with self.waits(call) as task:
                turn, reply = await self._ask(call)
        except PromptTooLong:
            if self._asked == call.index + 1:
                self._asked = call.index  # nothing was sampled: a shorter prompt is the same turn
            raise
        if self._stepped:
            self._recent.clear()
            self._stepped = False
            self._round += 1
        self._turns[call.index] = turn
        self._by_task[task] = call.index
        self._rounds[call.index] = self._round
        self.scores[call.index] = (
            dict(turn.scores) if turn.messages == call.messages else {"cut": 1.0}
        )
        self._recent.append(call.index)
        return turn, reply

    def count_call(self, agent: str) -> int:
        """The number of a tool call among the agent's, from 1."""
        self._calls[agent] += 1
        return self._calls[agent]

    def score(self, turn: int, /, **scores: float) -> None:
        """Write down what was measured of one turn, by name: for example `team.score(reply.turn, local=0.5)`.

        Raises:
            KeyError: there is no such turn.
        """
        if turn not in self.scores:
            raise KeyError(
                f"no turn {turn} to score; turns: {', '.join(map(str, sorted(self.scores))) or 'none'}"
            )
        self.scores[turn].update(scores)

    def seed(self, *what: int | str) -> int:
        """A seed for a choice that the orchestra makes itself, the same whenever this trajectory is played."""
        return derive_seed(*self._place, "orchestra", *what)

    def mask(self, turn: int, /) -> None:
        """Have a turn not train, because nobody has read its reply: its score `unread` is 1.

        Raises:
            KeyError: there is no such turn.
        """
        self._turns[turn] = replace(self._turns[turn], masked=True)
        self.score(turn, unread=1.0)

    def place(self, turn: int, /, node: str) -> None:
        """Say which node of a tree that the orchestra grows by itself a turn is; `leaf` says where the tree ended.

        Raises:
            KeyError: there is no such turn.
        """
        self._turns[turn] = replace(self._turns[turn], node=node)

    def credit(self, reward: float, metrics: Mapping[str, float]) -> None:
        """The environment stepped: its reward and metrics are scores of every turn since it stepped before.

        The reward is the score `team`. Steps without a turn between them belong to the same turns, and add up.
        """
        for index in self._recent:
            scores = self.scores[index]
            scores.update(metrics)
            scores["team"] = scores.get("team", 0.0) + reward
        self._stepped = True

    def waits(self, what: object) -> AbstractContextManager[asyncio.Task[Any]]:
        """Says that the running task, which it gives, waits for `what` for as long as it does."""
        return _Waits(self, what)

    async def prompt_tokens(
        self, agent: Agent, messages: Sequence[Message], chat: ChatState
    ) -> int:
        """How many tokens an agent would be asked with; EngineError if nobody here knows."""
        with Blamed(f"policy {agent.policy}"):
            return await prompt_tokens(self._team.players[agent.policy], messages, chat)

    async def close(self) -> None:
        """End the tasks that an orchestra left behind in `act` or in a step: it has ended."""
        self.closed = True
        await cancel_tasks(self.waiting)

    async def _ask(self, call: Call, node: str = "") -> TurnReply:
        """The engine's answer. Branches of a tree sample apart; the first of each round samples as without a tree."""
        agent = call.agent
        branch = (node,) if node.strip("0.") else ()
        seed = derive_seed(*self._place, agent.name, call.index, *branch)
        started = time.time()
        sampling = replace(agent.sampling, seed=seed, session=self._session)
        try:
            with Blamed(f"policy {agent.policy}"):
                said = await self._team.players[agent.policy].say(
                    call.messages, sampling, call.chat
                )
        except LateCall as late:
            raise LateCall(f"{call}: {late}", f"agent/{agent.name}") from None
        self.replies[seed] = RecordedReply(messages=call.messages, reply=said)
        with Blamed(f"parser of role {agent.role.name}"):
            reply = _heard(call, said)
        return _turn(call, said, reply, node=node, seed=seed, started_s=started), reply


class _Waits:  # see `Blamed`: no generator
    __slots__ = ("_seat", "_task", "_what")

    def __init__(self, seat: TeamSession, what: object) -> None:
        self._seat, self._what = seat, what

    def __enter__(self) -> asyncio.Task[Any]:
        loop = (
            asyncio.get_running_loop()
        )  # once: each time Python 3.11 asks the system for this process's number
        task = asyncio.current_task(loop)
        if self._seat.closed or task is None:
            raise asyncio.CancelledError  # the orchestra has ended and left this task behind
        self._task = task
        self._seat.waiting[task] = self._what, loop.time()
        return task

    def __exit__(self, *_: object) -> None:
        del self._seat.waiting[self._task]


def _turn(
    call: Call, said: PolicyReply, reply: AgentReply, *, node: str, seed: int, started_s: float
) -> Turn:
    agent, completion = call.agent, said.completion
    counts = {
        "tool_calls": len(reply.calls),
        "malformed_calls": len(reply.problems),
        "root": int(said.root),
    }
    return Turn(
        index=call.index,
        agent=agent.name,
        policy=agent.policy,
        policy_version=completion.versions[-1].version,
        versions=completion.versions,
        node=node,
        state_key=call.state_key,
        anchor=call.anchor,
        messages=call.messages if said.shown is None else said.shown,
        prompt_ids=said.prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        temperature=agent.sampling.temperature,
        text=said.text,
        finish_reason=completion.finish_reason,
        valid=not reply.problems and (bool(reply.calls) or reply.value is not None),
        seed=seed,
        started_s=started_s,
        took_s=time.time() - started_s,
        scores={name: float(count) for name, count in counts.items() if count},
        chat=call.chat.id if call.chat else "",
        masked=not said.trainable,
        routing=completion.routing,
    )


def _heard(call: Call, said: PolicyReply) -> AgentReply:
    """A policy's reply as its agent's: the role's value of it, and in a chat its calls of tools."""
    whole = said.completion.finish_reason == "stop"
    value = call.agent.role.parse(said.text) if whole else None
    if call.chat is None:
        return AgentReply(text=said.text, value=value, turn=call.index)
    raw = said.text if said.raw is None else said.raw
    parsed = parse_reply(raw, said.tool_format, f"{call.index}.")
    tools = whole and bool(call.chat.tools)
    content = parsed.text if tools else said.text
    calls, problems = (parsed.calls, parsed.problems) if tools else ((), {})
    raw = raw if raw != content else ""
    message = Message(
        role="assistant", content=content, reasoning=parsed.reasoning, calls=calls, raw=raw
    )
    return AgentReply(
        text=said.text, value=value, turn=call.index, message=message, problems=problems
    )


def _digest(messages: tuple[Message, ...]) -> str:
    parts = [f"{len(m.role)}:{m.role}{len(m.text)}:{m.text}" for m in messages]
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()
