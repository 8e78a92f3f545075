"""Decoys: wrong values among which a hidden test's expected value enters the sandbox.

A value whose class defines equality, such as a class of the repository, can be compared only inside
the sandbox. There it is compared with the expected value and with decoys, in random order, so that an
equality that is always true is detected.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

_DECOYS = 15  # largest number of decoys; of True, for example, there are fewer
_MAX_DRAWS = 300  # a draw may repeat an earlier one
_random = SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """An expected value among decoys.

    Attributes:
        texts: candidates as Python literals.
        expected: index of the expected value.
    """

    texts: Sequence[str]
    expected: int


def draw_candidates(expected: Any) -> Candidates:
    """Return an expected value among decoys.

    Decoys are changed copies of the expected value or of another decoy. If all were copies of the
    expected value, code in the sandbox could find it as the one that differs least from the others.
    Two of the decoys of a number are -10**15 and 10**15, which are not copies.

    Args:
        expected: plain data, whose `repr` is a literal.
    """
    copies = [expected]
    texts = [repr(expected)]
    if type(expected) in (int, float):
        # The other decoys are near the expected value, so a correct result may be smaller than all of
        # them, or larger. It lies between these two, so `<` is true for one of them and false for
        # the other. An object whose `<` is always true is therefore detected.
        texts += [repr(10**15), repr(-(10**15))]
    for _ in range(_MAX_DRAWS):
        if len(texts) > _DECOYS:
            break
        value = _change(_random.choice(copies))
        if repr(value) not in texts:
            copies.append(value)
            texts.append(repr(value))

    expected_text = texts[0]
    _random.shuffle(texts)
    return Candidates(texts=texts, expected=texts.index(expected_text))


def _change(value: Any) -> Any:
    """Return a copy of plain data with one random change.

    The copy may equal the original, for example if a letter is replaced by the same letter.
    """
    match value:
        case bool() | None:
            return _random.choice([True, False, None, "", 23])
        case int():
            return value + _random.choice([-1, 1]) * _random.randint(1, 12)
        case float():
            changed = value + _random.choice([-1, 1]) * _random.uniform(0.2, 2) * (abs(value) + 1)
            # The largest numbers would become infinite, whose `repr` is no literal.
            return changed if math.isfinite(changed) else value / 2
        case complex():
            return value + complex(_random.randint(1, 9), _random.randint(1, 9))
        case str():
            return "".join(_change_items(value, _random.choice(string.ascii_letters)))
        case bytes():
            return bytes(_change_items(value, _random.randint(32, 126)))
        case dict():
            return _change_dict(value)
        case set() | frozenset():
            return set(_change_items(list(value), _random.randint(10, 99)))
        case list() | tuple():
            return type(value)(_change_items(value, _random.randint(10, 99)))
    return _random.randint(10, 99)


def _change_items(items: Sequence[Any], extra: Any) -> list[Any]:
    """Return the items with one of them changed or removed, or with one added.

    Args:
        items: items of a collection, letters of a text or numbers of bytes.
        extra: item that may be added; in texts and bytes it may also replace one.
    """
    changed = list(items)
    if not changed or _random.random() < 0.2:
        changed.insert(_random.randint(0, len(changed)), extra)
        return changed

    index = _random.randrange(len(changed))
    is_text = isinstance(items, str | bytes)
    if len(changed) > 1 and _random.random() < 0.2:
        del changed[index]
    else:
        changed[index] = extra if is_text else _change(changed[index])
    return changed


def _change_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary with one value changed, or with a key that is a random letter."""
    if not value or _random.random() < 0.2:
        return {**value, _random.choice(string.ascii_letters): 0}
    key = _random.choice(list(value))
    return {**value, key: _change(value[key])}
