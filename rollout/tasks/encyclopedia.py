"""Questions about a generated encyclopedia, with its passages and demonstrations of the search team at work.

`one_hop` questions are answered by a person's own passage; `two_hop` questions need the passage of the person's town,
whose name only the first passage tells. People, and the towns they live in, belong to one split each.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollout.agent import Role
from rollout.envs.search import SearchEnv
from rollout.orchestras.search_team import search_team
from rollout.records import Demonstration, Message, Task
from rollout.seeds import derive_seed
from rollout.tasks.encyclopedia_world import Person, make_world, split_of
from rollout.team import Reply, Seat, Team

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
class Entry:
    """One passage of the encyclopedia."""

    title: str
    text: str


def passages(seed: int) -> list[Entry]:
    """The whole encyclopedia of `seed`, one passage a person and one a town, in a fixed order."""
    world = make_world(seed)
    people = [Entry(title=p.name, text=f"{p.name} is a {p.trade} who lives in {p.home.name}.") for p in world.people]
    towns = [
        Entry(title=t.name, text=f"{t.name} lies on the river {t.river} and sells {t.goods}.") for t in world.towns
    ]
    return people + towns


def generate(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Questions about the encyclopedia of `seed`: `sizes[split]` of each split, half of them one-hop, none twice.

    Raises:
        ValueError: a split is unknown or has too few people for so many questions.
    """
    return [task for split, size in sizes.items() for task in _generate_split(seed, split, size)]


def demonstrations(
    seed: int,
    n: int,
    roles: Mapping[str, Role],
    *,
    slips: Mapping[str, float] = CARELESS_VERIFIER,
    top_k: int = 1,
    style: str = "text",
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
        style: how they read, as at rollout (see `rollout.envs.search.PASSAGE_STYLES`).
    """
    people = [person for person in make_world(seed).people if person.split == "train"]
    book = _Book([entry for entry in passages(seed) if split_of(entry.title) == "train"])
    spoken = 0
    for episode in itertools.count():
        chance = random.Random(derive_seed("encyclopedia demonstration", seed, episode))
        person, fact = chance.choice(people), chance.choice(list(_QUESTIONS))
        guide = _Guide(person, fact, roles, chance, slips)
        asyncio.run(search_team(_task(person, fact), guide, SearchEnv(book, top_k=top_k, style=style)))
        for demonstration in guide.demonstrations:
            if spoken == n:
                return
            if chance.random() < _kept(demonstration):
                yield demonstration
                spoken += 1


def _kept(demonstration: Demonstration) -> float:
    if demonstration.agent == "verifier":
        return _KEPT_VERDICTS
    return _KEPT_UNKNOWN if demonstration.messages[-1].content == _UNKNOWN else 1.0


def _generate_split(seed: int, split: str, size: int) -> list[Task]:
    people = [person for person in make_world(seed).people if person.split == split]
    if not people:
        raise ValueError(f"unknown split '{split}'; the encyclopedia has train, validation and test")
    tasks: list[Task] = []
    for source, share in (("one_hop", size - size // 2), ("two_hop", size // 2)):
        pool = [(person, fact) for person in people for fact, (kind, _) in _QUESTIONS.items() if kind == source]
        if share > len(pool):
            raise ValueError(f"{share} {source} questions asked for in split '{split}'; its people allow {len(pool)}")
        chance = random.Random(derive_seed("encyclopedia tasks", seed, split, source))
        tasks += [_task(person, fact) for person, fact in chance.sample(pool, share)]
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

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._by_title = {entry.title: entry for entry in entries}
        self._by_word: dict[str, list[Entry]] = {}
        for entry in entries:
            for word in entry.title.split():
                self._by_word.setdefault(word, []).append(entry)
        self._first = entries[0]

    async def search(self, query: str, k: int) -> list[Entry]:
        exact = [self._by_title[query]] if query in self._by_title else []
        similar = [entry for word in reversed(query.split()) for entry in self._by_word.get(word, [])]
        return list(dict.fromkeys([*exact, *similar, self._first]))[:k]


class _Guide(Seat):
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
        self.demonstrations: list[Demonstration] = []

    async def act(self, name: str, /, **slots: object) -> Reply:
        role = self._roles[name]
        history = str(slots["history"])
        text = {"verifier": self._verdict, "searcher": self._query, "answerer": self._answer}[name](history)
        reply = Message(role="assistant", content=text)
        self.demonstrations.append(Demonstration(agent=name, messages=(*role.messages(**slots), reply)))
        value = role.parse(text)
        if value == "yes" and not self._knows(history, self._fact):
            value = "no"  # a premature yes is said but not acted on: nobody learns to answer from nothing
        return Reply(text=text, value=value, turn=len(self.demonstrations) - 1)

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

    def _answer(self, history: str) -> str:
        fact = _SIBLING[self._fact] if self._slip("answerer") else self._fact
        return f"<answer> {_fact(self._person, fact)} </answer>" if self._knows(history, fact) else _UNKNOWN
