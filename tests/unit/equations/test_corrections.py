"""Mismatch weights by hand, at every level."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_mas.equations.corrections import CORRECTIONS, icepop, importance, mis, none, tis
from mcore_mas.equations.log_ratios import Level

LEVELS: tuple[Level, ...] = get_args(Level)

# two replies whose tokens are not even neighbours: ratios (2, 2, 1/4) and (9, 1)
RATIOS = torch.tensor([2.0, 9.0, 2.0, 1.0, 0.25], dtype=torch.float64)
REPLIES = torch.tensor([7, 3, 7, 3, 7])


def weights(name: str, **options: object) -> list[float]:
    values: Tensor = CORRECTIONS[name](RATIOS.log(), REPLIES, **options)
    return values.tolist()


def test_importance_at_every_level() -> None:
    assert weights("importance") == pytest.approx([2, 9, 2, 1, 0.25])
    # 2 · 2 · 1/4 = 1 and 9 · 1 = 9
    assert weights("importance", level="sequence") == pytest.approx([1, 9, 1, 9, 1])
    # ∛1 and √9
    assert weights("importance", level="geometric") == pytest.approx([1, 3, 1, 3, 1])


def test_truncation_holds_only_from_above() -> None:
    assert weights("tis") == pytest.approx([2, 2, 2, 1, 0.25])
    assert weights("tis", high=4.0) == pytest.approx([2, 4, 2, 1, 0.25])
    assert weights("tis", level="sequence") == pytest.approx([1, 2, 1, 2, 1])
    assert weights("tis", level="geometric", high=1.5) == pytest.approx([1, 1.5, 1, 1.5, 1])


def test_masking_drops_what_is_outside() -> None:
    assert weights("mis") == pytest.approx([1, 0, 1, 0, 1])  # the reply above 2
    assert weights("mis", level="token", low=0.2, high=3.0) == pytest.approx([2, 0, 2, 1, 0.25])
    assert weights("mis", level="geometric", high=3.5) == pytest.approx([1, 3, 1, 3, 1])
    assert weights("icepop") == pytest.approx([2, 0, 2, 1, 0])  # above 5 and below 1/2
    assert weights("icepop", level="sequence", high=10.0) == pytest.approx([1, 9, 1, 9, 1])


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_one_impossible_token_vetoes_its_whole_reply(name: str) -> None:
    log_ratio = torch.tensor([0.0, 0.0, math.log(1e-5), 0.0], dtype=torch.float64)
    replies = torch.tensor([0, 1, 0, 1])
    assert CORRECTIONS[name](log_ratio, replies, level="token")[0] == 1
    assert CORRECTIONS[name](log_ratio, replies, level="token", veto=1e-4).tolist() == [0, 1, 0, 1]
    assert CORRECTIONS[name](log_ratio, replies, level="token", veto=1e-6)[0] == 1


def test_a_veto_looks_past_the_bound_of_exp() -> None:
    log_ratio = torch.tensor([-30.0, 0.0])
    assert importance(log_ratio, torch.tensor([0, 0]), veto=1e-12).tolist() == [0, 0]
    assert importance(log_ratio, torch.tensor([0, 0]), veto=1e-14).tolist() == pytest.approx(
        [math.exp(-20), 1]
    )


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_tokens_that_nobody_sampled_weigh_one(name: str, level: str) -> None:
    options = {} if name == "none" else {"level": level, "veto": 1e-4}
    log_ratio = torch.full((3,), math.nan)
    assert CORRECTIONS[name](log_ratio, torch.tensor([0, 0, 1]), **options).tolist() == [1, 1, 1]


def test_an_unknown_token_leaves_its_reply_as_it_is() -> None:
    log_ratio = torch.tensor([math.log(1.5), math.nan], dtype=torch.float64)
    assert mis(log_ratio, torch.tensor([0, 0])).tolist() == pytest.approx([1.5, 1.5])
    assert icepop(log_ratio, torch.tensor([0, 0])).tolist() == pytest.approx([1.5, 1])


def test_weights_carry_no_gradient() -> None:
    log_ratio = torch.zeros(2, requires_grad=True)
    assert not tis(log_ratio, torch.tensor([0, 1])).requires_grad
    assert not none(log_ratio, torch.tensor([0, 1])).requires_grad


TOKENS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=12)


@given(tokens=TOKENS, level=st.sampled_from(LEVELS), seed=st.integers(0, 99))
def test_the_order_of_tokens_does_not_matter(
    tokens: list[tuple[float, int]], level: str, seed: int
) -> None:
    log_ratio = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    replies = torch.tensor([number for _, number in tokens])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    for name, correct in CORRECTIONS.items():
        options = {} if name == "none" else {"level": level, "veto": 0.1}
        if name in ("mis", "icepop"):
            options |= {"low": 0.0, "high": 1e9}  # no weight may sit on the edge of the range
        assert torch.allclose(
            correct(log_ratio[order], replies[order], **options),
            correct(log_ratio, replies, **options)[order],
        )


def test_the_weight_of_an_extreme_reply_is_finite() -> None:
    long_reply = torch.full((1000,), 0.5)
    assert (
        importance(long_reply, torch.zeros(1000, dtype=torch.int64), level="sequence")
        .isfinite()
        .all()
    )
