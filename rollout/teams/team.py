"""Teams of agents, and the session that one trajectory has with its team."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from rollout.base.async_tasks import cancel_tasks
from rollout.base.deadlines import LateCall
from rollout.base.errors import Defect, PromptTooLong
from rollout.base.numbers import real_number
from rollout.engines import ChatState, PolicyClient, PolicyReply
from rollout.engines.client import EngineClient, count_prompt_tokens
from rollout.environments.protocol import ToolCall
from rollout.environments.tools import Tool
from rollout.models.tool_calls import parse_reply
from rollout.records.call_record import CallRecord
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Message, TokenCandidates, Turn
from rollout.teams.chat import Chat, ToolRunner
from rollout.teams.defects import DefectGuard
from rollout.teams.roles import Agent, AgentReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request for an agent's reply; the reply becomes a turn."""

    index: int  # of the turn
    agent: Agent
    messages: tuple[Message, ...]
    state_key: str  # digest of the messages, which are the state of the agent
    anchor: str = ""  # digest of the environment's state, "" if the environment reports none
    chat: ChatState | None = None  # None: a single question

    def __str__(self) -> str:
        return f"{self.agent.name} (turn {self.index})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A reply of a policy, and the messages that it answers."""

    messages: tuple[Message, ...]
    reply: PolicyReply


@dataclass(frozen=True, slots=True)
class Team:
    """The agents of a run and the policies that they act with, shared by all trajectories."""

    agents: Mapping[str, Agent]
    policies: Mapping[str, PolicyClient]
    max_turns: int | None = None  # of a trajectory, or of each branch of a tree; None: no limit

    def session(self, *seed_path: int | str, call_record: CallRecord | None = None) -> TeamSession:
        """Return a new session for one trajectory.

        Args:
            seed_path: keys of the trajectory, such as seed, step, task and sample, from which its
                seeds are derived.
            call_record: record of the trajectory's tool and environment calls that a restart must not
                repeat.
        """
        return TeamSession(self, seed_path, call_record)

    def with_sampling(self, **sampling: float) -> Team:
        """Return the team with these fields of every agent's `Sampling` replaced."""
        if not sampling:
            return self
        agents = {
            name: replace(agent, sampling=replace(agent.sampling, **sampling))  # type: ignore[arg-type]
            for name, agent in self.agents.items()
        }
        return replace(self, agents=agents)

    def with_policies(self, policies: Mapping[str, str]) -> Team:
        """Return the team with other policies for some agents.

        Args:
            policies: name of the policy by agent.
        """
        agents = dict(self.agents)
        for name, policy in policies.items():
            agents[name] = replace(agents[name], policy=policy)
        return replace(self, agents=agents)


class TeamSession:
    """The session of one trajectory with its team, which records every turn.

    `act` asks an agent once, `chat` opens a conversation with it.
    """

    def __init__(
        self, team: Team, seed_path: tuple[int | str, ...], call_record: CallRecord | None = None
    ) -> None:
        # Record of the tool and environment calls that a restart must not repeat.
        self.call_record = call_record or CallRecord()
        self.replies: dict[int, RecordedReply] = {}  # replies of policies, by the seed of the call
        self.scores: dict[int, dict[str, float]] = {}  # scores by name, by turn
        self.state = ""  # latest state of the environment, "" if it reports none
        # Node that the outcome comes from, in a tree that the orchestra grows; "" if there is none.
        self.leaf = ""
        self.tools: dict[str, Sequence[Tool]] = {}  # tools that are open, by agent
        # Makes a tool call; an episode replaces it by a function that times and records the call.
        self.run_tool: ToolRunner = _call_tool
        # Waits of this trajectory's asyncio tasks, in the order in which they began (a dict used as an
        # ordered set).
        self.waits: dict[Waiting, None] = {}
        # True once the trajectory has ended: none of its asyncio tasks may wait any more.
        self.closed = False

        self._team = team
        self._seed_path = seed_path
        self._name = "/".join(map(str, seed_path))
        # Turns by index. Branches of a tree share turns, but have their own rounds and scores of them.
        # Therefore `_rounds` and `scores` hold those of this session, and `turns` returns the turns
        # with them. Outside of a tree, a turn's mapping in `scores` is the turn's own.
        self._turns: dict[int, Turn] = {}
        self._rounds: dict[int, int] = {}  # number of the round, by turn
        self._calls_begun = 0  # also the index of the next turn
        # Index of the latest turn, by the asyncio task that asked for it.
        self._latest_turn: dict[object, int] = {}
        self._chat_counts: Counter[str] = Counter()  # number of chats, by agent
        self._tool_call_counts: Counter[str] = Counter()  # number of tool calls, by agent
        # A round is a run of turns and the steps of the environment after them: the first turn after a
        # step begins a new round. A step before the first turn belongs to no round.
        self._round = 0  # number of the current round, from 0
        self._round_turns: list[int] = []  # turns of the current round
        self._stepped = False  # True after a step: the next turn begins a new round

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far with their rounds and scores, in the order of their calls."""
        return tuple(self._scored_turn(index) for index in sorted(self._turns))

    def _scored_turn(self, index: int) -> Turn:
        """Return a turn with its round and its present scores."""
        turn = self._turns[index]
        round_number = self._rounds[index]
        scores = self.scores[index]
        # Most turns have them already, and a copy would take a tenth of the time that the session
        # takes for a turn.
        if turn.round == round_number and turn.scores == scores:
            return turn
        return replace(turn, round=round_number, scores=scores)

    @property
    def last_turn(self) -> Turn | None:
        """The recorded turn whose call began last, or None."""
        return self._turns[max(self._turns)] if self._turns else None

    @property
    def current_task_turn(self) -> Turn | None:
        """The latest turn that the running asyncio task asked for; `last_turn` if it asked for none."""
        index = self._latest_turn.get(asyncio.current_task())
        return self.last_turn if index is None else self._turns[index]

    def turn(self, index: int) -> Turn:
        """Return the turn of this index.

        In a branch it has the round of the branch that sampled it, and no later scores (see `turns`).
        """
        return self._turns[index]

    def token_texts(self, turn: Turn) -> list[str]:
        """Return the text that each sampled token of a turn adds; [] for a model behind an API."""
        policy = self._team.policies[turn.policy]
        if not isinstance(policy, EngineClient):
            return []
        return policy.renderer.token_texts(turn.completion_ids)

    def candidate_texts(self, turn: Turn, candidates: TokenCandidates) -> list[tuple[str, float]]:
        """Return the texts of tokens that a turn's policy could have sampled, with their log-probabilities."""
        policy = self._team.policies[turn.policy]
        assert isinstance(policy, EngineClient), "a model behind an API reports no candidates"
        return [(policy.renderer.token_texts([token])[0], logprob) for token, logprob in candidates]

    @property
    def agents(self) -> Collection[Agent]:
        """The agents of the team."""
        return self._team.agents.values()

    @property
    def has_trainable_turn(self) -> bool:
        """True if an agent whose tokens can be trained has replied.

        In a team of remote models alone, no agent can be trained, and any reply counts.
        """
        policies = {agent.policy: self._team.policies[agent.policy] for agent in self.agents}
        trainable = {name for name, policy in policies.items() if isinstance(policy, EngineClient)}
        if not trainable:
            return bool(self._turns)
        return any(turn.policy in trainable for turn in self._turns.values())

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        """Ask an agent once, with its user template's slots filled by `slots`.

        Raises:
            KeyError: the team has no such agent, or its template has a slot that was not given.
            EngineError: the engine could not answer.
            Defect: the engine or the role's parser raised something else, or the trajectory has taken
                as many turns as it may.
        """
        agent = self._team.agents[name]
        _, reply = await self.take_turn(agent, agent.role.messages(**slots))
        return reply

    def chat(
        self, name: str, /, *, system: str | None = None, tools: Sequence[Tool] | None = None
    ) -> Chat:
        """Open a chat with an agent; an agent may have several chats.

        Args:
            system: system prompt of the chat; None: the role's.
            tools: tools that the agent may call; None: those that the config gives to it.

        Raises:
            KeyError: the team has no such agent.
        """
        agent = self._team.agents[name]
        return Chat(
            self,
            agent,
            self.new_chat_id(name),
            agent.role.system if system is None else system,
            self.tools.get(name, ()) if tools is None else tools,
        )

    def new_chat_id(self, agent: str) -> str:
        """Return the id of a new chat with an agent."""
        self._chat_counts[agent] += 1
        return f"{agent}/{self._chat_counts[agent] - 1}"

    async def take_turn(
        self, agent: Agent, messages: tuple[Message, ...], chat: ChatState | None = None
    ) -> tuple[Turn, AgentReply]:
        """Have an agent reply to `messages`, and record the turn.

        Args:
            agent: agent that replies.
            messages: the whole prompt, in a chat with the earlier messages.
            chat: state of the chat that the reply belongs to; None: a single question.

        Raises:
            EngineError: the engine could not answer; `PromptTooLong` if the prompt leaves no room
                for a reply.
            Defect: the trajectory has taken as many turns as it may, or the policy or the role's
                parser raised something else.
        """
        self._check_turn_limit()
        anchor = ""
        if self.state:
            anchor = _digest((Message(role="state", content=self.state),))
        call = Call(
            index=self._calls_begun,
            agent=agent,
            messages=messages,
            state_key=_digest(messages),
            anchor=anchor,
            chat=chat,
        )
        self._calls_begun += 1
        try:
            with self.waits_for(call) as task:
                turn, reply = await self._ask(call)
        except PromptTooLong:
            # If no call began meanwhile, a retry with a shorter prompt gets the same index.
            if self._calls_begun == call.index + 1:
                self._calls_begun = call.index
            raise
        self._record(call, turn, task)
        return turn, reply

    def _check_turn_limit(self) -> None:
        """Raise Defect if the trajectory has taken as many turns as it may."""
        max_turns = self._team.max_turns
        if max_turns is not None and self._calls_begun >= max_turns:
            raise Defect(
                f"orchestra: asked for more than collection.max_turns ({max_turns}) turns; end its "
                "loop, or raise the key"
            )

    def _record(self, call: Call, turn: Turn, task: asyncio.Task[Any]) -> None:
        """Record a turn in the current round, or in a new round after a step of the environment.

        Args:
            call: call that the turn answers.
            turn: the turn.
            task: asyncio task that asked for it.
        """
        if self._stepped:
            self._round_turns.clear()
            self._stepped = False
            self._round += 1
        scores = self._scores_of(turn)
        if turn.messages != call.messages:  # the engine client has cut the messages to fit
            scores["cut"] = 1.0
        self._turns[call.index] = turn
        self._latest_turn[task] = call.index
        self._rounds[call.index] = self._round
        self._round_turns.append(call.index)
        self.scores[call.index] = scores

    def _scores_of(self, turn: Turn) -> dict[str, float]:
        """Return the mapping to which the later scores of a new turn are added.

        It is the turn's own, because only this session has the turn.
        """
        assert isinstance(turn.scores, dict)
        return turn.scores

    def count_tool_call(self, agent: str) -> int:
        """Count a tool call of an agent; return its number, from 1."""
        self._tool_call_counts[agent] += 1
        return self._tool_call_counts[agent]

    def score(self, turn: int, /, **scores: float) -> None:
        """Record scores of a turn by name, for example `team.score(reply.turn, local=0.5)`.

        Raises:
            KeyError: there is no such turn.
            TypeError: a score is not a real number.
        """
        if turn not in self.scores:
            turns = ", ".join(map(str, sorted(self.scores))) or "none"
            raise KeyError(f"no turn {turn} to score; turns: {turns}")
        for name, value in scores.items():
            self.scores[turn][name] = real_number(value, f"score '{name}' of turn {turn}")

    def seed(self, *choice: int | str) -> int:
        """Return a seed for a random choice of the orchestra, equal whenever the trajectory is played again.

        All branches and replays of a trajectory get the same seed.

        Args:
            choice: keys that identify the choice in the trajectory.
        """
        return derive_seed(*self._seed_path, "orchestra", *choice)

    def mark_unread(self, turn: int, /) -> None:
        """Exclude a turn from training because nobody has read its reply; its score `unread` is 1.

        Raises:
            KeyError: there is no such turn.
        """
        self._turns[turn] = replace(self._turns[turn], masked=True)
        self.score(turn, unread=1.0)

    def set_node(self, turn: int, /, node: str) -> None:
        """Set the node of a turn in a tree that the orchestra grows (see `leaf`).

        Raises:
            KeyError: there is no such turn.
        """
        self._turns[turn] = replace(self._turns[turn], node=node)

    def credit_step(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Add a step's reward to the score `team` of all turns of the current round.

        The step's metrics become scores of the same names on these turns, and overwrite earlier
        scores of these names. A metric named `team` is left out.
        """
        for index in self._round_turns:
            scores = self.scores[index]
            team_reward = scores.get("team", 0.0) + reward
            scores.update(metrics)
            scores["team"] = team_reward
        if self._round_turns:
            self._stepped = True

    def waits_for(self, awaited: object) -> AbstractContextManager[asyncio.Task[Any]]:
        """Return a context that records that the running asyncio task waits for a call, and yields the task."""
        return Waiting(self, awaited)

    @property
    def innermost_waits(self) -> list[Waiting]:
        """The waits that contain no other wait.

        While a tool asks an agent, that is the wait for the agent, and not the one for the tool.
        """
        return [wait for wait in self.waits if not wait.inner_count]

    async def prompt_tokens(
        self, agent: Agent, messages: Sequence[Message], chat: ChatState
    ) -> int:
        """Return the number of prompt tokens of a call.

        Raises:
            EngineError: the agent's model is behind an API, so its tokenizer is not known here.
        """
        with DefectGuard(f"policy {agent.policy}"):
            return await count_prompt_tokens(self._team.policies[agent.policy], messages, chat)

    async def close(self) -> None:
        """Cancel the asyncio tasks that an ended orchestra has left waiting for a call or a step."""
        self.closed = True
        await cancel_tasks(wait.task for wait in self.waits)

    async def _ask(self, call: Call, node: str = "") -> tuple[Turn, AgentReply]:
        """Ask the call's policy, and parse its reply.

        Args:
            call: call that the policy answers.
            node: `Turn.node` of the turn.

        Returns:
            The turn, which is not recorded yet, and the reply.

        Raises:
            LateCall, PromptTooLong, EngineError: the policy could not answer.
            Defect: the policy or the role's parser raised something else.
        """
        agent = call.agent
        # The nodes "", "0", "0.0" and so on are the first path, which has the seeds of a trajectory
        # without a tree. Every other node has its own seeds.
        is_first_path = not node.strip("0.")
        branch = () if is_first_path else (node,)
        seed = derive_seed(*self._seed_path, agent.name, call.index, *branch)
        sampling = replace(agent.sampling, seed=seed, session=self._name)
        policy = self._team.policies[agent.policy]
        started_s = time.time()
        try:
            with DefectGuard(f"policy {agent.policy}"):
                policy_reply = await policy.say(call.messages, sampling, call.chat)
        except LateCall as late:
            raise LateCall(f"{call}: {late}", f"agent/{agent.name}") from None
        except PromptTooLong as error:
            raise PromptTooLong(f"{call}: {error}") from None

        self.replies[seed] = RecordedReply(messages=call.messages, reply=policy_reply)
        with DefectGuard(f"parser of role {agent.role.name}"):
            agent_reply = _agent_reply(call, policy_reply)
        turn = _turn(
            call,
            policy_reply,
            agent_reply,
            round_number=self._round + 1 if self._stepped else self._round,
            node=node,
            seed=seed,
            started_s=started_s,
        )
        return turn, agent_reply


async def _call_tool(name: str, call: Callable[[], Awaitable[ToolCall]], turn: int) -> ToolCall:
    """Make a tool call without a record, as a session without an episode does."""
    return await call()


# Innermost wait that the running code is in, such as the wait for a tool that asks an agent. The next
# wait to begin is inside of it. The asyncio tasks that this code starts inherit it.
_current_wait: ContextVar[Waiting | None] = ContextVar("current_wait", default=None)


class Waiting:  # a class, because @contextmanager would be several times slower
    """Context in which the running asyncio task waits for a call.

    Attributes:
        awaited: the call; its text describes it.
        since: start of the wait on the event loop's clock.
        task: asyncio task that waits.
        inner_count: number of waits inside of this one that have not ended, such as those for the
            agents that a tool asks.
    """

    __slots__ = ("_outer", "_session", "awaited", "inner_count", "since", "task")

    task: asyncio.Task[Any]
    since: float

    def __init__(self, session: TeamSession, awaited: object) -> None:
        self.awaited = awaited
        self.inner_count = 0
        self._session = session
        self._outer: Waiting | None = None

    def __enter__(self) -> asyncio.Task[Any]:
        # The loop is looked up once: each look-up takes a system call in Python 3.11, and `current_task()` would
        # make another.
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if self._session.closed or task is None:
            # The orchestra has ended and left this task behind, or the code runs in no asyncio task.
            raise asyncio.CancelledError
        self.task = task
        self.since = loop.time()
        self._session.waits[self] = None

        self._outer = _current_wait.get()
        if self._outer is not None:
            self._outer.inner_count += 1
        _current_wait.set(self)
        return task

    def __exit__(self, *_: object) -> None:
        _current_wait.set(self._outer)
        if self._outer is not None:
            self._outer.inner_count -= 1
        del self._session.waits[self]


def _turn(
    call: Call,
    policy_reply: PolicyReply,
    agent_reply: AgentReply,
    *,
    round_number: int,
    node: str,
    seed: int,
    started_s: float,
) -> Turn:
    """Return the record of a turn; scores that are 0 are left out."""
    agent = call.agent
    completion = policy_reply.completion
    scores: dict[str, float] = {}
    if agent_reply.calls:
        scores["tool_calls"] = float(len(agent_reply.calls))
    if agent_reply.problems:
        scores["malformed_calls"] = float(len(agent_reply.problems))
    if policy_reply.root:
        scores["root"] = 1.0
    is_usable = bool(agent_reply.calls) or agent_reply.value is not None
    return Turn(
        index=call.index,
        round=round_number,
        agent=agent.name,
        policy=agent.policy,
        policy_version=completion.versions[-1].version,
        versions=completion.versions,
        node=node,
        state_key=call.state_key,
        anchor=call.anchor,
        messages=call.messages if policy_reply.shown is None else policy_reply.shown,
        prompt_ids=policy_reply.prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        temperature=agent.sampling.temperature,
        text=policy_reply.text,
        finish_reason=completion.finish_reason,
        valid=is_usable and not agent_reply.problems,
        seed=seed,
        started_s=started_s,
        took_s=time.time() - started_s,
        scores=scores,
        chat=call.chat.id if call.chat else "",
        masked=not policy_reply.trainable,
        routing=completion.routing,
        grammar=policy_reply.grammar,
    )


def _agent_reply(call: Call, reply: PolicyReply) -> AgentReply:
    """Parse a policy's reply: its value by the role's parser, and in a chat with tools its tool calls.

    A reply that is cut off has neither.
    """
    is_whole = reply.completion.finish_reason == "stop"
    value = call.agent.role.parse(reply.text) if is_whole else None
    if call.chat is None:
        return AgentReply(text=reply.text, value=value, turn=call.index)

    raw = reply.text if reply.raw is None else reply.raw
    parsed = parse_reply(raw, reply.tool_format, f"{call.index}.")
    if is_whole and call.chat.tools:
        content = parsed.text
        calls = parsed.calls
        problems = parsed.problems
    else:
        content = reply.text
        calls = ()
        problems = {}
    message = Message(
        role="assistant",
        content=content,
        reasoning=parsed.reasoning,
        calls=calls,
        raw=raw if raw != content else "",
    )
    return AgentReply(
        text=reply.text,
        value=value,
        turn=call.index,
        message=message,
        problems=problems,
        candidates=reply.completion.candidates,
    )


def _digest(messages: tuple[Message, ...]) -> str:
    """Return a digest of messages, as 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for message in messages:
        role, text = message.role, message.text
        # The lengths keep apart messages whose texts would be equal when joined.
        digest.update(f"{len(role)}:{role}{len(text)}:{text}".encode())
    return digest.hexdigest()
