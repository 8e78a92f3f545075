"""Scripted teachers that reply in place of agents; their replies become demonstrations.

A `TeachingSession` stands in for a team whose agents get one prompt per turn, without tools.
`chat_demonstrations` plays the real team with its real tools, with a teacher in place of its
models.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from rollout.engines import ChatState, PolicyReply
from rollout.environments.protocol import Env
from rollout.models.tool_calls import write_tools_as_text
from rollout.records.trajectory import EMPTY_COMPLETION, Demonstration, Message, Sampling, Task
from rollout.teams.episode import Episode, Orchestra
from rollout.teams.roles import Agent, AgentReply, Role
from rollout.teams.team import Team, TeamSession

# Returns an agent's reply to its chat so far.
Teacher = Callable[[str, Sequence[Message]], str]


class TeachingSession(TeamSession):
    """Session of a team whose replies are scripted, by `reply_of` of a subclass.

    Attributes:
        demonstrations: all replies so far, with their prompts.
    """

    def __init__(
        self, roles: Mapping[str, Role], slips: Mapping[str, float], random: Random
    ) -> None:
        """Begin without replies.

        Args:
            roles: role of each agent.
            slips: probability of a slip by agent; 0 for agents that are not named.
            random: decides on slips.
        """
        super().__init__(Team({}, {}), ())
        self.demonstrations: list[Demonstration] = []
        self._roles = roles
        self._slips = slips
        self._random = random

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        """Return the reply of an agent, and record it."""
        role = self._roles[name]
        text = self.reply_of(name, slots)
        messages = (*role.messages(**slots), Message(role="assistant", content=text))
        self.demonstrations.append(Demonstration(agent=name, messages=messages))
        return AgentReply(text=text, value=role.parse(text), turn=len(self.demonstrations) - 1)

    def reply_of(self, agent: str, slots: Mapping[str, object]) -> str:
        """Return the reply of an agent.

        Args:
            agent: name of the agent.
            slots: values in its prompt.
        """
        raise NotImplementedError

    def score(self, index: int, /, **scores: float) -> None:
        """Ignore scores, which demonstrations do not have."""

    def slips(self, agent: str) -> bool:
        """Return True if an agent slips now."""
        return self._random.random() < self._slips.get(agent, 0.0)


@dataclass(frozen=True, slots=True)
class _TaughtPolicy:
    """Policy that replies as a teacher does, and stores each chat with its latest reply.

    Attributes:
        agent: agent that the teacher speaks for.
        teacher: returns the replies.
        chats: demonstrations by the id of the chat.
    """

    agent: str
    teacher: Teacher
    chats: dict[str, Demonstration]

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        assert chat is not None
        text = self.teacher(self.agent, messages)
        reply = Message(role="assistant", content=text)
        conversation = write_tools_as_text([*messages, reply], chat.tools)
        self.chats[chat.id] = Demonstration(agent=self.agent, messages=tuple(conversation))
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=EMPTY_COMPLETION)


def chat_demonstrations(
    lessons: Iterable[tuple[Task, Teacher]],
    make_env: Callable[[Task], Env],
    agents: Mapping[str, Agent],
    orchestra: Orchestra,
    n: int,
) -> Iterator[Demonstration]:
    """Yield `n` whole chats in which a teacher speaks for the team.

    The chats of all lessons are yielded in order, and again once all were yielded.

    Args:
        lessons: tasks with their teachers.
        make_env: makes the environment of a task.
        agents: agents of the team, with their tools.
        orchestra: orchestra of the team.
        n: number of chats.

    Raises:
        ValueError: a lesson failed.
    """

    async def play_all() -> list[Demonstration]:
        demonstrations: list[Demonstration] = []
        for task, teacher in lessons:
            demonstrations += await _play_lesson(task, teacher, make_env, agents, orchestra)
        return demonstrations

    return islice(cycle(asyncio.run(play_all())), n)


async def _play_lesson(
    task: Task,
    teacher: Teacher,
    make_env: Callable[[Task], Env],
    agents: Mapping[str, Agent],
    orchestra: Orchestra,
) -> list[Demonstration]:
    """Play a task, with a teacher for every agent; return all chats."""
    chats: dict[str, Demonstration] = {}
    taught_agents = {name: replace(agent, policy=name) for name, agent in agents.items()}
    team = Team(taught_agents, {name: _TaughtPolicy(name, teacher, chats) for name in agents})
    session = team.session("demonstration", task.id)
    episode = Episode(task, session, make_env, orchestra)
    await episode.play()
    if episode.error:
        raise ValueError(f"the demonstration of task {task.id} failed: {episode.error}")
    return list(chats.values())


def tool_call_text(tool: str, **arguments: str) -> str:
    """Return a tool call in the form that models use if their chat template has no such format."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"```tool\n{call}\n```"
