"""Questions about the generated encyclopedia, and demonstrations of two search teams.

`one_hop` questions are answered by a person's own passage. `two_hop` questions need the passage of
the person's home town, whose name only the person's passage tells.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pydantic import PositiveInt

from retrieval.client import Passage
from rollout.base.section import Share
from rollout.environments.search import PassageStyle, SearchEnv
from rollout.orchestras.search import memory_search, search_team
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks.encyclopedia_world import (
    Person,
    make_encyclopedia,
    passages,
    split_of_entity,
)
from rollout.tasks.splits import draw_listed
from rollout.tasks.teaching import (
    Teacher,
    TeachingSession,
    chat_demonstrations,
    tool_call_text,
)
from rollout.teams.roles import Agent, AgentReply, Role


@dataclass(frozen=True, slots=True)
class _Question:
    """Question about a fact.

    Attributes:
        source: data source, "one_hop" or "two_hop".
        text: text with a gap for the person's name.
        sibling: other fact in the same passage.
    """

    source: str
    text: str
    sibling: str


# Questions by the fact that they ask for.
_QUESTIONS = {
    "trade": _Question("one_hop", "What is the trade of {name}?", "home"),
    "home": _Question("one_hop", "Which town is the home of {name}?", "trade"),
    "river": _Question("two_hop", "Which river runs by the home of {name}?", "goods"),
    "goods": _Question("two_hop", "Which goods are sold in the home of {name}?", "river"),
}

# Default probabilities of slips by agent.
SEARCH_TEAM_SLIPS: Mapping[str, float] = {"verifier": 0.45}
MEMORY_TEAM_SLIPS: Mapping[str, float] = {"lead": 0.4, "scout": 0.2}

# Shares of easy turns that are shown. Verdicts and answers without information teach little and
# outnumber the others: a model that sees all of them does not learn to copy names.
_SHOWN_VERDICTS = 0.3
_SHOWN_UNKNOWN = 0.2

_UNKNOWN = "<answer> unknown </answer>"


def encyclopedia_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Draw sizes[split] different questions for each split, half of them one-hop."""
    tasks = []
    for split, size in sizes.items():
        tasks += _draw_split(seed, split, size)
    return tasks


def _draw_split(seed: int, split: str, size: int) -> list[Task]:
    people = [person for person in make_encyclopedia(seed).people if person.split == split]
    two_hop = size // 2
    tasks: list[Task] = []
    for source, count in (("one_hop", size - two_hop), ("two_hop", two_hop)):
        facts = [fact for fact, question in _QUESTIONS.items() if question.source == source]
        pool = list(itertools.product(people, facts))
        generator = random.Random(derive_seed("encyclopedia tasks", seed, split, source))
        drawn = draw_listed(f"encyclopedia, {source}", split, count, pool, generator)
        tasks += [_make_task(person, fact) for person, fact in drawn]
    random.Random(derive_seed("encyclopedia order", seed, split)).shuffle(tasks)
    return tasks


def _make_task(person: Person, fact: str) -> Task:
    question = _QUESTIONS[fact]
    return Task(
        id=f"encyclopedia/{fact}/{person.name.lower().replace(' ', '-')}",
        prompt=question.text.format(name=person.name),
        answers=(_value_of(fact, person),),
        env="search",
        source=question.source,
        split=person.split,
    )


def _value_of(fact: str, person: Person) -> str:
    values = {
        "trade": person.trade,
        "home": person.home.name,
        "river": person.home.river,
        "goods": person.home.goods,
    }
    return values[fact]


def encyclopedia_demonstrations(
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    slips: Mapping[str, Share] = SEARCH_TEAM_SLIPS,
    top_k: PositiveInt = 1,
    style: PassageStyle = "text",
) -> Iterator[Demonstration]:
    """Yield `n` turns of a search team on training questions.

    They are in the order in which they were spoken, and easy turns are thinned out. The real
    orchestra and environment are played, so that every prompt is the prompt of a rollout. A verifier
    that slips gives the wrong verdict; a searcher that slips asks by surname only, or asks again for
    the person; an answerer that slips tells the other fact of the passage. A policy that imitates this team
    perfectly writes well-formed replies, but is far from always right: by default it answers a
    one-hop question with probability 0.55 and a two-hop question with 0.3. The rest is for
    reinforcement learning.

    Args:
        seed: seed of the run.
        n: number of turns.
        roles: the roles as the rollout will use them, by agent name: verifier, searcher, answerer.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        top_k: number of passages of a search, as in a rollout.
        style: form of the passages, as in a rollout (`rollout.environments.search.PASSAGE_STYLES`).
    """
    retriever = _make_train_retriever(seed)

    def all_turns() -> Iterator[Demonstration]:
        for episode in _train_episodes(seed, "encyclopedia demonstration"):
            task = _make_task(episode.person, episode.fact)
            teacher = _SearchTeacher(episode, roles, slips)
            env = SearchEnv(task, retriever=retriever, top_k=top_k, style=style)
            asyncio.run(search_team(task, teacher, env))
            for demonstration in teacher.demonstrations:
                if episode.random.random() < _shown_share(demonstration):
                    yield demonstration

    return itertools.islice(all_turns(), n)


def _shown_share(demonstration: Demonstration) -> float:
    """Return the probability with which a turn is shown."""
    if demonstration.agent == "verifier":
        return _SHOWN_VERDICTS
    return _SHOWN_UNKNOWN if demonstration.messages[-1].content == _UNKNOWN else 1.0


def memory_demonstrations(
    seed: int,
    n: int,
    *,
    agents: Mapping[str, Agent],
    slips: Mapping[str, Share] = MEMORY_TEAM_SLIPS,
    top_k: PositiveInt = 1,
    style: PassageStyle = "text",
    episodes: PositiveInt = 1500,
) -> Iterator[Demonstration]:
    """Yield `n` chats of the team `memory_search` on training questions.

    The lead asks for the person and then, for a two-hop question, for the town. The scout searches
    for the person or town, and reports the passage. A lead that slips answers too early or with the
    other fact of the passage; a scout that slips searches for the surname only.

    Args:
        seed: seed of the run.
        n: number of chats.
        agents: the team as the rollout will use it.
        slips: probability of a slip by agent and turn; 0 for an agent that is not named.
        top_k: number of passages of a search, as in a rollout.
        style: form of the passages, as in a rollout.
        episodes: number of plays; they are shown again once all were shown.
    """
    retriever = _make_train_retriever(seed)
    make_env = partial(SearchEnv, retriever=retriever, top_k=top_k, style=style)
    lessons: list[tuple[Task, Teacher]] = []
    for episode in itertools.islice(_train_episodes(seed, "encyclopedia chats"), episodes):
        task = _make_task(episode.person, episode.fact)
        teacher = _SearchTeacher(episode, {}, slips)
        lessons.append((task, teacher.chat_reply))
    orchestra = partial(memory_search, max_turns=2, max_calls=2)
    return chat_demonstrations(lessons, make_env, agents, orchestra, n)


@dataclass(frozen=True, slots=True)
class _Episode:
    """Question of a demonstration, and the random numbers of its slips."""

    person: Person
    fact: str
    random: random.Random


def _train_episodes(seed: int, purpose: str) -> Iterator[_Episode]:
    """Yield episodes about people of the training split, without end.

    Args:
        seed: seed of the run.
        purpose: purpose of the demonstrations, which is part of the episodes' seeds.
    """
    people = [person for person in make_encyclopedia(seed).people if person.split == "train"]
    facts = list(_QUESTIONS)
    for number in itertools.count():
        generator = random.Random(derive_seed(purpose, seed, number))
        person = generator.choice(people)
        fact = generator.choice(facts)
        yield _Episode(person, fact, generator)


def _make_train_retriever(seed: int) -> "_TitleRetriever":
    """Return a retriever over the passages of the training split."""
    return _TitleRetriever(
        [passage for passage in passages(seed) if split_of_entity(passage.title) == "train"]
    )


class _TitleRetriever:
    """Retriever by title: the exact title first, then titles that share a word with the query."""

    def __init__(self, entries: Sequence[Passage]) -> None:
        self._by_title = {passage.title: passage for passage in entries}
        self._by_word: dict[str, list[Passage]] = {}
        for passage in entries:
            for word in passage.title.split():
                self._by_word.setdefault(word, []).append(passage)
        self._fallback = entries[0]

    async def search(self, query: str, k: int) -> list[Passage]:
        """Return up to `k` passages for a query, and at least one."""
        results = []
        if query in self._by_title:
            results.append(self._by_title[query])
        # Start at the last word: people with the same surname come before people with the same
        # first name.
        for word in reversed(query.split()):
            results += self._by_word.get(word, [])
        results.append(self._fallback)
        return list(dict.fromkeys(results))[:k]


class _SearchTeacher(TeachingSession):
    """Team that knows the answer to a question about a person."""

    def __init__(
        self, episode: _Episode, roles: Mapping[str, Role], slips: Mapping[str, float]
    ) -> None:
        super().__init__(roles, slips, episode.random)
        self._person = episode.person
        self._fact = episode.fact
        self._query = ""  # query that the lead gives to the scout

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        """Return the reply of an agent, and record it.

        A verdict "yes" that comes too early is recorded, but the team goes on searching. Otherwise
        the answerer would be shown how to answer without information.
        """
        reply = await super().act(name, **slots)
        if reply.value == "yes" and not self._knows(self._fact, str(slots["history"])):
            return replace(reply, value="no")
        return reply

    def reply_of(self, agent: str, slots: Mapping[str, object]) -> str:
        """Return the reply of verifier, searcher or answerer."""
        history = str(slots["history"])
        slips = self.slips(agent)
        if agent == "verifier":
            is_enough = self._knows(self._fact, history) != slips
            return f"<verify>{'yes' if is_enough else 'no'}</verify>"
        if agent == "answerer":
            return self._answer(history, slips)
        person = self._person.name
        if self._knows("home", history):
            return f"<search> {person if slips else self._person.home.name} </search>"
        return f"<search> {_surname(person) if slips else person} </search>"

    def chat_reply(self, agent: str, messages: Sequence[Message]) -> str:
        """Return the reply of lead or scout to its chat so far."""
        last = messages[-1]
        if agent == "scout":
            if last.role == "tool":
                passage = last.content.removeprefix("<information>").removesuffix("</information>")
                return f"<evidence>{passage}</evidence>"
            query = _surname(self._query) if self.slips(agent) else self._query
            return tool_call_text("search", query=query)

        history = "\n".join(message.content for message in messages)
        slips = self.slips(agent)
        if slips or self._knows(self._fact, history):
            return self._answer(history, slips)
        knows_home = self._knows("home", history)
        self._query = self._person.home.name if knows_home else self._person.name
        return f"<search> {self._query} </search>"

    def _knows(self, fact: str, history: str) -> bool:
        """Return True if the passage that tells a fact is in the history."""
        is_about_person = _QUESTIONS[fact].source == "one_hop"
        subject = self._person.name if is_about_person else self._person.home.name
        return f"{subject} is a " in history or f"{subject} lies on " in history

    def _answer(self, history: str, slips: bool) -> str:
        """Return the answer, or the sibling fact if the agent slips; "unknown" without passage."""
        fact = _QUESTIONS[self._fact].sibling if slips else self._fact
        if not self._knows(fact, history):
            return _UNKNOWN
        return f"<answer> {_value_of(fact, self._person)} </answer>"


def _surname(name: str) -> str:
    """Return the last word of a name."""
    return name.split()[-1]
