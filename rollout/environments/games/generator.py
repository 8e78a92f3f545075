"""Generated puzzles: what a game's generator promises, and how a teacher's demonstrations slip."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

SPLITS = ("train", "validation", "test")

Owns = Callable[[str], bool]  # whether a puzzle with this key may be drawn


class Source(Protocol):
    """All puzzles of a game with given options."""

    @property
    def game(self) -> str:
        """Name in GAMES."""

    @property
    def name(self) -> str:
        """The data source, in which results are reported."""

    def draw(self, random: Random, owns: Owns) -> str | None:
        """A random solvable puzzle as the game shows it; None when this draw came to none, or to one not owned.

        `owns` is asked with a key as early as it is known. Puzzles that differ in key have nothing in common that
        could be learned by heart.
        """

    def everything(self) -> Sequence[tuple[str, str]] | None:
        """(key, puzzle) of every puzzle in a fixed order, where they are few enough to list; else None."""

    def slip(self, random: Random, actions: str) -> str:
        """A list of actions with one mistake."""


def split_of(key: str) -> str:
    """The split that owns a key, whatever the seed: 80 % train, 10 % validation, 10 % test."""
    bucket = hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 10
    return ("validation", "test")[bucket] if bucket < 2 else "train"


def replace_one(random: Random, actions: str, pattern: str, alphabet: Sequence[str]) -> str:
    """`actions` with one match of `pattern`, any of them, replaced by another word of `alphabet`."""
    chosen = random.choice(list(re.finditer(pattern, actions)))
    other = random.choice([word for word in alphabet if word != chosen[0]])
    return actions[: chosen.start()] + other + actions[chosen.end() :]
