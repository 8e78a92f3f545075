"""Question-answering tasks, generated: an encyclopedia, its passages, and demonstrations of two search teams.

`one_hop` questions are answered by a person's own passage; `two_hop` questions need the passage of the person's town,
whose name only the first passage tells. People, and the towns they live in, belong to one split each.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from pydantic import PositiveInt

from retrieval.client import Passage
from rollout.base.section import Share
from rollout.base.yaml_files import read_yaml
from rollout.environments.search import PassageStyle, SearchEnv
from rollout.orchestras.search import memory_search, search_team
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks.chats import Teacher, TeachingSession, asked_for, taught
from rollout.tasks.splits import draw_listed
from rollout.teams.roles import Agent, AgentReply, Role

_QUESTIONS = {
    "trade": ("one_hop", "What is the trade of {name}?"),
    "home": ("one_hop", "Which town is the home of {name}?"),
    "river": ("two_hop", "Which river runs by the home of {name}?"),
    "goods": ("two_hop", "Which goods are sold in the home of {name}?"),
}
CARELESS_VERIFIER: Mapping[str, float] = {"verifier": 0.45}
# verdicts teach little a turn and outnumber the rest: in full they drown what copying has to learn
_KEPT_VERDICTS = 0.3
_KEPT_UNKNOWN = 0.2  # likewise answers without information
_UNKNOWN = "<answer> unknown </answer>"
_SIBLING = {
    "trade": "home",
    "home": "trade",
    "river": "goods",
    "goods": "river",
}  # told by the same passage


def passages(seed: int) -> list[Passage]:
    """The whole encyclopedia of `seed`, one passage a person and one a town, in a fixed order."""
    world = make_encyclopedia(seed)
    people = [
        (p.name, f"{p.name} is a {p.trade} who lives in {p.home.name}.") for p in world.people
    ]
    towns = [
        (t.name, f"{t.name} lies on the river {t.river} and sells {t.goods}.") for t in world.towns
    ]
    return [Passage.compose(str(row), *entry) for row, entry in enumerate(people + towns)]


def encyclopedia_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Questions about the encyclopedia of `seed`: `sizes[split]` of each split, half of them one-hop, none twice."""
    return [task for split, size in sizes.items() for task in _generate_split(seed, split, size)]


def encyclopedia_demonstrations(
    seed: int,
    n: int,
    *,
    roles: Mapping[str, Role],
    slips: Mapping[str, Share] = CARELESS_VERIFIER,
    top_k: PositiveInt = 1,
    style: PassageStyle = "text",
) -> Iterator[Demonstration]:
    """`n` turns of a team at work on train questions, in the order they were spoken; easy turns are thinned out.

    The real orchestra and environment are played, so every prompt is the prompt of a rollout. The team is careless: at
    each of its turns an agent slips with probability `slips[agent]`. Then the verifier gives the wrong verdict, the
    searcher asks by surname only or asks again what it knows, the answerer tells the other fact of the same passage.
    A policy that imitates this team perfectly is legal but far from right, whatever its seed: by default it answers
    a one-hop question with probability 0.55 and a two-hop question with 0.3. The rest is for reinforcement learning.

    Args:
        roles: the roles as the rollout will use them, by agent name: verifier, searcher, answerer.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        top_k: passages a search, as at rollout.
        style: how they read, as at rollout (see `rollout.environments.search.PASSAGE_STYLES`).
    """
    book = _train_book(seed)

    def spoken() -> Iterator[Demonstration]:
        for chance, person, fact in _train_questions(seed, "encyclopedia demonstration"):
            task, guide = _task(person, fact), _Guide(person, fact, roles, chance, slips)
            asyncio.run(
                search_team(task, guide, SearchEnv(task, retriever=book, top_k=top_k, style=style))
            )
            yield from (one for one in guide.demonstrations if chance.random() < _kept(one))

    return itertools.islice(spoken(), n)


def _train_book(seed: int) -> _Book:
    """The passages about what the training split owns."""
    return _Book([entry for entry in passages(seed) if split_of_entity(entry.title) == "train"])


def _train_questions(seed: int, of: str) -> Iterator[tuple[random.Random, Person, str]]:
    """Training questions without an end: a person and a fact, with what the rest of their episode is drawn from."""
    people = [person for person in make_encyclopedia(seed).people if person.split == "train"]
    for episode in itertools.count():
        chance = random.Random(derive_seed(of, seed, episode))
        yield chance, chance.choice(people), chance.choice(list(_QUESTIONS))


def _kept(demonstration: Demonstration) -> float:
    if demonstration.agent == "verifier":
        return _KEPT_VERDICTS
    return _KEPT_UNKNOWN if demonstration.messages[-1].content == _UNKNOWN else 1.0


def _generate_split(seed: int, split: str, size: int) -> list[Task]:
    people = [person for person in make_encyclopedia(seed).people if person.split == split]
    tasks: list[Task] = []
    for source, share in (("one_hop", size - size // 2), ("two_hop", size // 2)):
        pool = [
            (person, fact)
            for person in people
            for fact, (kind, _) in _QUESTIONS.items()
            if kind == source
        ]
        chance = random.Random(derive_seed("encyclopedia tasks", seed, split, source))
        tasks += [
            _task(person, fact)
            for person, fact in draw_listed(f"encyclopedia, {source}", split, share, pool, chance)
        ]
    random.Random(derive_seed("encyclopedia order", seed, split)).shuffle(tasks)
    return tasks


def _task(person: Person, fact: str) -> Task:
    source, question = _QUESTIONS[fact]
    id = f"encyclopedia/{fact}/{person.name.lower().replace(' ', '-')}"
    prompt, answers = question.format(name=person.name), (_fact(person, fact),)
    return Task(
        id=id, prompt=prompt, answers=answers, env="search", source=source, split=person.split
    )


def _fact(person: Person, fact: str) -> str:
    town = person.home
    return {"trade": person.trade, "home": town.name, "river": town.river, "goods": town.goods}[
        fact
    ]


class _Book:
    """The encyclopedia opened by title: an exact title first, then titles that share a word with the query."""

    def __init__(self, entries: Sequence[Passage]) -> None:
        self._by_title = {entry.title: entry for entry in entries}
        self._by_word: dict[str, list[Passage]] = {}
        for entry in entries:
            for word in entry.title.split():
                self._by_word.setdefault(word, []).append(entry)
        self._first = entries[0]

    async def search(self, query: str, k: int) -> list[Passage]:
        exact = [self._by_title[query]] if query in self._by_title else []
        similar = [
            entry for word in reversed(query.split()) for entry in self._by_word.get(word, [])
        ]
        return list(dict.fromkeys([*exact, *similar, self._first]))[:k]


class _Guide(TeachingSession):
    """A team that knows the answer about a person."""

    def __init__(
        self,
        person: Person,
        fact: str,
        roles: Mapping[str, Role],
        chance: random.Random,
        slips: Mapping[str, float],
    ):
        super().__init__(roles, slips, chance)
        self._person, self._fact = person, fact
        self._wanted = ""  # what the lead asks for

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        reply = await super().act(name, **slots)
        early = reply.value == "yes" and not self._knows(str(slots["history"]), self._fact)
        # a premature yes is said but not acted on: nobody learns to answer from nothing
        return replace(reply, value="no") if early else reply

    def said_by(self, agent: str, slots: Mapping[str, object]) -> str:
        history, slip = str(slots["history"]), self.slip(agent)
        if agent == "verifier":
            return f"<verify>{'yes' if self._knows(history, self._fact) != slip else 'no'}</verify>"
        if agent == "answerer":
            return self._ending(history, _SIBLING[self._fact] if slip else self._fact)
        name = self._person.name
        if self._knows(history, "home"):
            return f"<search> {name if slip else self._person.home.name} </search>"
        return f"<search> {name.split()[-1] if slip else name} </search>"

    def say(self, agent: str, messages: Sequence[Message]) -> str:
        """What lead or scout says in its chat."""
        said, last = "\n".join(message.content for message in messages), messages[-1].content
        if agent == "scout":
            if messages[-1].role == "tool":
                return f"<evidence>{last.removeprefix('<information>').removesuffix('</information>')}</evidence>"
            return asked_for(
                "search", query=self._wanted.split()[-1] if self.slip(agent) else self._wanted
            )
        known, slip = self._knows(said, self._fact), self.slip(agent)
        if known or slip:
            return self._ending(said, _SIBLING[self._fact] if slip else self._fact)
        self._wanted = (self._person.home if self._knows(said, "home") else self._person).name
        return f"<search> {self._wanted} </search>"

    def _knows(self, history: str, fact: str) -> bool:
        """Whether the passage that tells `fact` has been found."""
        subject = self._person.name if _QUESTIONS[fact][0] == "one_hop" else self._person.home.name
        return f"{subject} is a " in history or f"{subject} lies on " in history

    def _ending(self, history: str, fact: str) -> str:
        return (
            f"<answer> {_fact(self._person, fact)} </answer>"
            if self._knows(history, fact)
            else _UNKNOWN
        )


CARELESS_LEAD: Mapping[str, float] = {"lead": 0.4, "scout": 0.2}


def memory_demonstrations(
    seed: int,
    n: int,
    *,
    agents: Mapping[str, Agent],
    slips: Mapping[str, Share] = CARELESS_LEAD,
    top_k: PositiveInt = 1,
    style: PassageStyle = "text",
    episodes: PositiveInt = 1500,
) -> Iterator[Demonstration]:
    """`n` chats of the team `memory_search` on training questions.

    The lead asks for the person and then, of a two-hop question, for the town; the scout searches for what it is asked
    and reports the passage. Where it slips the lead answers too early, or with the other fact of the passage, and the
    scout searches for the surname only.

    Args:
        agents: the team as the rollout will use it.
        slips: probability of a slip by agent and turn; 0 for an agent that is not named.
        top_k: passages a search, as at rollout.
        style: how they read, as at rollout.
        episodes: plays that are shown, over and over.
    """
    book = _train_book(seed)
    make_env = partial(SearchEnv, retriever=book, top_k=top_k, style=style)
    lessons: list[tuple[Task, Teacher]] = []
    for chance, person, fact in itertools.islice(
        _train_questions(seed, "encyclopedia chats"), episodes
    ):
        task, guide = _task(person, fact), _Guide(person, fact, {}, chance, slips)
        lessons.append((task, guide.say))
    return taught(lessons, make_env, agents, partial(memory_search, max_turns=2, max_calls=2), n)


PEOPLE = 2000
TOWNS = 480


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    """A town and what its passage says."""

    name: str
    split: str  # of the people who live here
    river: str
    goods: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A person and what the passage says; the home is a town of the same split."""

    name: str
    split: str
    trade: str
    home: Town


@dataclass(frozen=True, slots=True, kw_only=True)
class Encyclopedia:
    """Everybody and every town of one seed."""

    people: tuple[Person, ...]
    towns: tuple[Town, ...]


def split_of_entity(name: str) -> str:
    """The split of an entity in every world, by its name's hash: 70 % train, 10 % validation, 20 % test."""
    digit = derive_seed("encyclopedia split", name) % 10
    return "train" if digit < 7 else "validation" if digit < 8 else "test"


@lru_cache(maxsize=4)
def make_encyclopedia(seed: int) -> Encyclopedia:
    """The world of `seed`: PEOPLE distinct people in TOWNS distinct towns."""
    chance = random.Random(derive_seed("encyclopedia world", seed))
    words = {
        kind: text.split() for kind, text in read_yaml(Path(__file__).with_suffix(".yaml")).items()
    }

    def names(first: str, last: str, count: int) -> list[str]:
        return chance.sample(
            [f"{one} {other}" for one in words[first] for other in words[last]], count
        )

    towns = tuple(
        Town(
            name=name,
            split=split_of_entity(name),
            river=chance.choice(words["rivers"]),
            goods=chance.choice(words["goods"]),
        )
        for name in names("town_adjectives", "town_nouns", TOWNS)
    )
    homes = {
        split: [town for town in towns if town.split == split]
        for split in ("train", "validation", "test")
    }
    people = tuple(
        Person(
            name=name,
            split=split,
            trade=chance.choice(words["trades"]),
            home=chance.choice(homes[split]),
        )
        for name in names("first_names", "surnames", PEOPLE)
        for split in (split_of_entity(name),)
    )
    return Encyclopedia(people=people, towns=towns)
