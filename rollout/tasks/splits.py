"""Data splits of generated tasks: train, validation and test share nothing, whatever the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def split_of(key: str) -> str:
    """The split that owns a key, whatever the seed: 80 % train, 10 % validation, 10 % test."""
    bucket = hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 10
    return ("validation", "test")[bucket] if bucket < 2 else "train"


def check_splits(where: str, asked: Iterable[str]) -> None:
    """Refuse a split that does not exist.

    Raises:
        ValueError: it does not.
    """
    unknown = sorted(set(asked) - set(SPLITS))
    if unknown:
        raise ValueError(f"{where}: unknown split {', '.join(unknown)}; splits: {', '.join(SPLITS)}")
