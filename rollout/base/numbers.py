"""Numbers that code of the user's returns: Python's, NumPy's, or tensors with one element."""

import numbers
from decimal import Decimal
from typing import Any


def real_number(value: Any, owner: str) -> float:
    """Convert a number from a user's code to an int or a float of Python, which can be written to files.

    Args:
        value: an int or a float, one of NumPy's numbers, a Fraction or a Decimal, or an array or a
            tensor with one element.
        owner: description of the value for the error, such as "Adder.step: its reward".

    Raises:
        TypeError: the value is not a real number.
    """
    if isinstance(value, (int, float)):
        return value
    number = value
    item = getattr(value, "item", None)  # of NumPy's numbers and arrays, and of tensors
    if callable(item):
        try:
            number = item()
        except (TypeError, ValueError, RuntimeError):
            number = None  # several elements, or none
    if isinstance(number, (int, float)):
        return number
    if isinstance(number, (numbers.Real, Decimal)):
        return float(number)
    shown = " ".join(repr(value).split())[:200]
    raise TypeError(
        f"{owner} is {shown}, of type {type(value).__name__}; expected a real number, such as 0.5"
    )
