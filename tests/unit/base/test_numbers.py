"""Numbers of users' code become Python's; other values are refused with their type."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rollout.base.numbers import real_number


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        np.float16(0.5),
        np.float32(0.5),
        np.float64(0.5),
        np.array(0.5),
        np.array([[0.5]]),
        torch.tensor(0.5),
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.tensor(0.5, requires_grad=True),
        Decimal("0.5"),
        Fraction(1, 2),
    ],
)
def test_a_half(value: Any) -> None:
    number = real_number(value, "it")
    assert number == 0.5
    assert isinstance(number, float)


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_a_whole_number(value: Any) -> None:
    number = real_number(value, "it")
    assert (number, type(number)) == (2, int)


@pytest.mark.parametrize("value", [True, np.bool_(1), torch.tensor(True)])
def test_a_truth(value: Any) -> None:
    assert real_number(value, "it") is True


@pytest.mark.parametrize(
    "value",
    [
        None,
        "0.5",
        b"0.5",
        [0.5],
        0.5j,
        np.complex64(1),
        np.array([0.5, 0.5]),
        np.array([]),
        np.array(["0.5"]),
        torch.tensor([0.5, 0.5]),
        torch.empty(0),
        torch.empty((), device="meta"),
    ],
)
def test_no_number(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"it is .*, of type \w+; expected a real number"
    ) as refusal:
        real_number(value, "it")
    assert "\n" not in str(refusal.value)
