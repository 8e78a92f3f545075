"""Generated encyclopedia: people, the towns that they live in, and a passage about each of them.

A person's passage tells the trade and the home town; a town's passage tells the river and the
goods. People, and the towns that they live in, belong to one split each.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

from retrieval.client import Passage
from rollout.base.yaml_files import read_yaml
from rollout.records.seeds import derive_seed
from rollout.tasks.splits import SPLITS

PEOPLE = 2000
TOWNS = 480


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    """Town with the facts of its passage.

    Attributes:
        split: split of the people who live in the town.
    """

    name: str
    split: str
    river: str
    goods: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Person with the facts of its passage; the home is a town of the same split."""

    name: str
    split: str
    trade: str
    home: Town


@dataclass(frozen=True, slots=True, kw_only=True)
class Encyclopedia:
    """All people and towns of one seed."""

    people: tuple[Person, ...]
    towns: tuple[Town, ...]


def split_of_entity(name: str) -> str:
    """Return the split of a person or a town, for every seed.

    70 % of all names belong to train, 10 % to validation and 20 % to test.
    """
    digit = derive_seed("encyclopedia split", name) % 10
    if digit < 7:
        return "train"
    return "validation" if digit < 8 else "test"


@lru_cache(maxsize=4)
def make_encyclopedia(seed: int) -> Encyclopedia:
    """Generate the encyclopedia of a seed: 2000 different people in 480 different towns."""
    generator = random.Random(derive_seed("encyclopedia world", seed))
    words = _word_lists()

    def draw_names(first: str, last: str, count: int) -> list[str]:
        """Draw different names from two lists of words."""
        all_names = [f"{word} {other}" for word, other in product(words[first], words[last])]
        return generator.sample(all_names, count)

    towns = []
    for name in draw_names("town_adjectives", "town_nouns", TOWNS):
        river = generator.choice(words["rivers"])
        goods = generator.choice(words["goods"])
        towns.append(Town(name=name, split=split_of_entity(name), river=river, goods=goods))

    homes: dict[str, list[Town]] = {split: [] for split in SPLITS}
    for town in towns:
        homes[town.split].append(town)
    people = []
    for name in draw_names("first_names", "surnames", PEOPLE):
        split = split_of_entity(name)
        trade = generator.choice(words["trades"])
        home = generator.choice(homes[split])
        people.append(Person(name=name, split=split, trade=trade, home=home))
    return Encyclopedia(people=tuple(people), towns=tuple(towns))


def _word_lists() -> Mapping[str, list[str]]:
    texts = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {kind: text.split() for kind, text in texts.items()}


def passages(seed: int) -> list[Passage]:
    """Return all passages of a seed's encyclopedia in a fixed order: people, then towns."""
    world = make_encyclopedia(seed)
    entries = [
        (person.name, f"{person.name} is a {person.trade} who lives in {person.home.name}.")
        for person in world.people
    ]
    entries += [
        (town.name, f"{town.name} lies on the river {town.river} and sells {town.goods}.")
        for town in world.towns
    ]
    return [Passage.compose(str(row), title, text) for row, (title, text) in enumerate(entries)]
