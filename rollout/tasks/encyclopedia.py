"""Question-answering tasks, generated: an encyclopedia, its passages, and demonstrations of two search teams.

`one_hop` questions are answered by a person's own passage; `two_hop` questions need the passage of the person's town,
whose name only the first passage tells. People, and the towns they live in, belong to one split each.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from pydantic import PositiveInt

from mcore_mas.rollout.base.options import Share
from mcore_mas.rollout.environments.protocol import Env
from mcore_mas.rollout.environments.search import PassageStyle, SearchEnv
from mcore_mas.rollout.orchestras.search import memory_search, search_team
from mcore_mas.rollout.records.trajectory import Demonstration, Message, Task, derive_seed
from mcore_mas.rollout.tasks.chats import Teacher, asked_for, taught
from mcore_mas.rollout.tasks.splits import draw_listed
from mcore_mas.rollout.teams.roles import Agent, AgentReply, Role
from mcore_mas.rollout.teams.team import Team, TeamSession

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
_SIBLING = {"trade": "home", "home": "trade", "river": "goods", "goods": "river"}  # told by the same passage


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """One passage of the encyclopedia."""

    title: str
    text: str


def passages(seed: int) -> list[Article]:
    """The whole encyclopedia of `seed`, one passage a person and one a town, in a fixed order."""
    world = make_encyclopedia(seed)
    people = [Article(title=p.name, text=f"{p.name} is a {p.trade} who lives in {p.home.name}.") for p in world.people]
    towns = [
        Article(title=t.name, text=f"{t.name} lies on the river {t.river} and sells {t.goods}.") for t in world.towns
    ]
    return people + towns


def encyclopedia_tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Questions about the encyclopedia of `seed`: `sizes[split]` of each split, half of them one-hop, none twice.

    Raises:
        ValueError: a split has too few people for so many questions.
    """
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
        seed: of the encyclopedia and of the slips.
        n: number of demonstrations.
        roles: the roles as the rollout will use them, by agent name: verifier, searcher, answerer.
        slips: probability of a slip, in [0, 1], by agent; 0 for an agent that is not named.
        top_k: passages a search, as at rollout.
        style: how they read, as at rollout (see `mcore_mas.rollout.environments.search.PASSAGE_STYLES`).
    """
    book, spoken = _train_book(seed), 0
    for chance, person, fact in _train_questions(seed, "encyclopedia demonstration"):
        guide = _Guide(person, fact, roles, chance, slips)
        task = _task(person, fact)
        asyncio.run(search_team(task, guide, SearchEnv(task, retriever=book, top_k=top_k, style=style)))
        for demonstration in guide.demonstrations:
            if spoken == n:
                return
            if chance.random() < _kept(demonstration):
                yield demonstration
                spoken += 1


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
        pool = [(person, fact) for person in people for fact, (kind, _) in _QUESTIONS.items() if kind == source]
        chance = random.Random(derive_seed("encyclopedia tasks", seed, split, source))
        tasks += [
            _task(person, fact) for person, fact in draw_listed(f"encyclopedia, {source}", split, share, pool, chance)
        ]
    random.Random(derive_seed("encyclopedia order", seed, split)).shuffle(tasks)
    return tasks


def _task(person: Person, fact: str) -> Task:
    source, question = _QUESTIONS[fact]
    return Task(
        id=f"encyclopedia/{fact}/{person.name.lower().replace(' ', '-')}",
        prompt=question.format(name=person.name),
        answers=(_fact(person, fact),),
        env="search",
        source=source,
        split=person.split,
    )


def _fact(person: Person, fact: str) -> str:
    town = person.home
    return {"trade": person.trade, "home": town.name, "river": town.river, "goods": town.goods}[fact]


class _Book:
    """The encyclopedia opened by title: an exact title first, then titles that share a word with the query."""

    def __init__(self, entries: Sequence[Article]) -> None:
        self._by_title = {entry.title: entry for entry in entries}
        self._by_word: dict[str, list[Article]] = {}
        for entry in entries:
            for word in entry.title.split():
                self._by_word.setdefault(word, []).append(entry)
        self._first = entries[0]

    async def search(self, query: str, k: int) -> list[Article]:
        exact = [self._by_title[query]] if query in self._by_title else []
        similar = [entry for word in reversed(query.split()) for entry in self._by_word.get(word, [])]
        return list(dict.fromkeys([*exact, *similar, self._first]))[:k]


class _Guide(TeamSession):
    """A team that knows the answer, slips now and then, and writes down what it said."""

    def __init__(
        self, person: Person, fact: str, roles: Mapping[str, Role], chance: random.Random, slips: Mapping[str, float]
    ):
        super().__init__(Team({}, {}), ())
        self._person = person
        self._fact = fact
        self._roles = roles
        self._chance = chance
        self._slips = slips
        self._wanted = ""  # what the lead asks for
        self.demonstrations: list[Demonstration] = []

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        role = self._roles[name]
        history = str(slots["history"])
        text = {"verifier": self._verdict, "searcher": self._query, "answerer": self._last}[name](history)
        reply = Message(role="assistant", content=text)
        self.demonstrations.append(Demonstration(agent=name, messages=(*role.messages(**slots), reply)))
        value = role.parse(text)
        if value == "yes" and not self._knows(history, self._fact):
            value = "no"  # a premature yes is said but not acted on: nobody learns to answer from nothing
        return AgentReply(text=text, value=value, turn=len(self.demonstrations) - 1)

    def say(self, agent: str, messages: Sequence[Message]) -> str:
        """What lead or scout says in its chat."""
        said, last = "\n".join(message.content for message in messages), messages[-1].content
        if agent == "scout":
            if messages[-1].role == "tool":
                return f"<evidence>{last.removeprefix('<information>').removesuffix('</information>')}</evidence>"
            return asked_for("search", query=self._wanted.split()[-1] if self._slip(agent) else self._wanted)
        known, slip = self._knows(said, self._fact), self._slip(agent)
        if known or slip:
            return self._ending(said, _SIBLING[self._fact] if slip else self._fact)
        self._wanted = (self._person.home if self._knows(said, "home") else self._person).name
        return f"<search> {self._wanted} </search>"

    def _slip(self, agent: str) -> bool:
        return self._chance.random() < self._slips.get(agent, 0.0)

    def _knows(self, history: str, fact: str) -> bool:
        """Whether the passage that tells `fact` has been found."""
        subject = self._person.name if _QUESTIONS[fact][0] == "one_hop" else self._person.home.name
        return f"{subject} is a " in history or f"{subject} lies on " in history

    def _verdict(self, history: str) -> str:
        enough = self._knows(history, self._fact) != self._slip("verifier")
        return f"<verify>{'yes' if enough else 'no'}</verify>"

    def _query(self, history: str) -> str:
        if not self._knows(history, "home"):
            query = self._person.name.split()[-1] if self._slip("searcher") else self._person.name
        else:
            query = self._person.name if self._slip("searcher") else self._person.home.name
        return f"<search> {query} </search>"

    def _last(self, history: str) -> str:
        return self._ending(history, _SIBLING[self._fact] if self._slip("answerer") else self._fact)

    def _ending(self, history: str, fact: str) -> str:
        return f"<answer> {_fact(self._person, fact)} </answer>" if self._knows(history, fact) else _UNKNOWN


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
    lessons: list[tuple[Task, Teacher, Env]] = []
    for chance, person, fact in itertools.islice(_train_questions(seed, "encyclopedia chats"), episodes):
        task, guide = _task(person, fact), _Guide(person, fact, {}, chance, slips)
        lessons.append((task, guide.say, SearchEnv(task, retriever=book, top_k=top_k, style=style)))
    return taught(lessons, agents, partial(memory_search, max_turns=2, max_calls=2), n)


PEOPLE = 2000
TOWNS = 480


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# A person is a first name and a surname, a town two nouns: each part is in many names, so a model that has seen the
# parts can copy any name. No word is in two lists, and each reads as an ordinary word to a text encoder.
_FIRST = _words(
    """
    Alice Arthur Boris Clara Daniel Edith Felix Grace Hannah Ivan Julia Kevin Laura Martin Nadia Oscar Paula
    Quentin Robert Sofia Thomas Ursula Victor Wendy Xavier Yusuf Zoe Bruno Carmen Dmitri Elena Frank Gloria Hugo
    Irene Jonas Karen Leon Maria Nathan Olga Peter Rosa Simon Tara Vera Walter Amir Diego Fatima
    """
)
_LAST = _words(
    """
    Walker Becker Castro Dalton Evans Fischer Garcia Hansen Ibrahim Jensen Keller Lopez Murray Novak Olsen Patel
    Quinn Rossi Schmidt Tanaka Underwood Vargas Weber Young Zhang Adams Brennan Cohen Dubois Ericsson Ferrari
    Gupta Hughes Ivanov Jackson Kowalski Lambert Moreau Nielsen Osborne Pereira Romano Silva Turner Vogel Watson
    Yamada Zimmerman Barnes Collins Doyle Foster Graham Harper Kapoor Larsen Morgan Nguyen Parker Sutton
    """
)
_TOWN_FIRST = _words(
    """
    Silver Golden Copper Iron Crystal Velvet Winter Summer Autumn Misty Sunny Stormy Quiet Hidden Frozen Broken
    Ancient Royal Crimson Emerald Ivory Scarlet Bitter Happy
    """
)
_TOWN_LAST = _words(
    """
    Harbor Valley Bridge Castle Garden Market Island Forest Meadow Canyon Tower Temple Village Desert Glacier
    Lagoon Orchard Quarry Summit Prairie Cavern Fortress Chapel Beach
    """
)
_TRADES = _words("baker smith weaver teacher doctor lawyer painter sailor farmer miller tailor butcher")
_RIVERS = _words("Otter Heron Falcon Badger Raven Salmon Beaver Swan Lynx Cobra Panther Turtle")
_GOODS = _words("wool salt glass honey cheese paper silk rope wine leather pottery candles")


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
    town_names = chance.sample([f"{first} {last}" for first in _TOWN_FIRST for last in _TOWN_LAST], TOWNS)
    towns = tuple(
        Town(name=name, split=split_of_entity(name), river=chance.choice(_RIVERS), goods=chance.choice(_GOODS))
        for name in town_names
    )
    homes = {split: [town for town in towns if town.split == split] for split in ("train", "validation", "test")}
    names = chance.sample([f"{first} {last}" for first in _FIRST for last in _LAST], PEOPLE)
    people = tuple(
        Person(name=name, split=split, trade=chance.choice(_TRADES), home=chance.choice(homes[split]))
        for name, split in ((name, split_of_entity(name)) for name in names)
    )
    return Encyclopedia(people=people, towns=towns)
