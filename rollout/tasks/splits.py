"""Assignment of generated tasks to data splits, and sampling without replacement."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from random import Random
from typing import Literal, TypeVar

_T = TypeVar("_T")

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

# Draws in a row without a new item after which the search for further items ends.
_MAX_MISSES = 20_000


def split_of(key: str) -> str:
    """Return the split that a key belongs to, for every seed.

    About 80 % of all keys belong to train, 10 % to validation and 10 % to test.
    """
    first_byte = hashlib.blake2b(key.encode(), digest_size=8).digest()[0]
    bucket = first_byte % 10
    if bucket == 0:
        return "validation"
    if bucket == 1:
        return "test"
    return "train"


def draw_different(
    source: str,
    split: str,
    size: int,
    draw: Callable[[], _T | None],
    key: Callable[[_T], Hashable] = lambda item: item,
) -> list[_T]:
    """Draw until there are `size` items with different keys.

    Args:
        source: name of the data source, for errors.
        split: name of the split, for errors.
        size: number of items.
        draw: returns an item, or None if the item belongs to another split.
        key: key of an item.

    Raises:
        ValueError: many draws in a row gave no new item, so there may not be `size` different ones.
    """
    items: dict[Hashable, _T] = {}
    misses = 0
    while len(items) < size:
        item = draw()
        count = len(items)
        if item is not None:
            items.setdefault(key(item), item)
        misses = misses + 1 if len(items) == count else 0
        if misses > _MAX_MISSES:
            raise ValueError(
                f"{source}: data.{split} asks for {size} different tasks, but after {count} of them "
                f"{_MAX_MISSES} draws in a row gave no new one; lower data.{split}, or let the "
                "generator's options give larger tasks"
            )
    return list(items.values())


def draw_listed(
    source: str, split: str, size: int, items: Sequence[_T], random: Random
) -> list[_T]:
    """Draw `size` of the items of a split, without replacement.

    Args:
        source: name of the data source, for errors.
        split: name of the split, for errors.
        size: number of items.
        items: items of the split.
        random: random numbers.

    Raises:
        ValueError: the split has fewer items.
    """
    if size > len(items):
        raise ValueError(
            f"{source}: {size} {split} tasks asked for, but there are {len(items)}; lower "
            f"data.{split}"
        )
    return random.sample(items, size)


def content_digest(*texts: str) -> str:
    """Return a digest of a task's content, with which its id ends, of 16 hexadecimal digits."""
    return hashlib.blake2b("".join(texts).encode(), digest_size=8).hexdigest()
