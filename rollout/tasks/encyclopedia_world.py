"""A fictional world of people who live in towns, made of names that every split shares part by part."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from rollout.seeds import derive_seed

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
class World:
    """Everybody and every town of one seed."""

    people: tuple[Person, ...]
    towns: tuple[Town, ...]


def split_of(name: str) -> str:
    """The split of an entity in every world, by its name's hash: 70 % train, 10 % validation, 20 % test."""
    digit = derive_seed("encyclopedia split", name) % 10
    return "train" if digit < 7 else "validation" if digit < 8 else "test"


@lru_cache(maxsize=4)
def make_world(seed: int) -> World:
    """The world of `seed`: PEOPLE distinct people in TOWNS distinct towns."""
    chance = random.Random(derive_seed("encyclopedia world", seed))
    town_names = chance.sample([f"{first} {last}" for first in _TOWN_FIRST for last in _TOWN_LAST], TOWNS)
    towns = tuple(
        Town(name=name, split=split_of(name), river=chance.choice(_RIVERS), goods=chance.choice(_GOODS))
        for name in town_names
    )
    homes = {split: [town for town in towns if town.split == split] for split in ("train", "validation", "test")}
    names = chance.sample([f"{first} {last}" for first in _FIRST for last in _LAST], PEOPLE)
    people = tuple(
        Person(name=name, split=split_of(name), trade=chance.choice(_TRADES), home=chance.choice(homes[split_of(name)]))
        for name in names
    )
    return World(people=people, towns=towns)
