"""A term of the product's objectives that is 1 % off is beyond the bound: on one rank, in seconds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.equations import losses
from mcore_mas.equations.divergence import CORRECTIONS, KL_ESTIMATES
from tests.exactness.formulas import CASES, VALUE_CASES
from tests.exactness.objectives import Found, jobs, measure
from tests.exactness.rows import Row

pytestmark = pytest.mark.usefixtures("one_rank")
MORE = 1.01
POLICY, CRITIC = Row(name="one rank"), Row(name="critic", critic=True)


def clips(patch: pytest.MonkeyPatch) -> None:
    """Both clips of the ratio."""
    plain: Callable[..., Any] = losses._clipped
    patch.setattr(
        losses,
        "_clipped",
        lambda r, a, low, high, dual: plain(r, a, low=low * MORE, high=high * MORE, dual=dual),
    )


def dual_clip(patch: pytest.MonkeyPatch) -> None:
    """The bound of a negative advantage's loss."""
    plain: Callable[..., Any] = losses._clipped
    patch.setattr(
        losses, "_clipped", lambda r, a, low, high, dual: plain(r, a, low, high, dual=dual * MORE)
    )


def kl(patch: pytest.MonkeyPatch) -> None:
    """The KL term."""
    plain = KL_ESTIMATES["k3"]
    patch.setitem(KL_ESTIMATES, "k3", lambda logprobs, reference: MORE * plain(logprobs, reference))


def truncation(patch: pytest.MonkeyPatch) -> None:
    """The largest weight of truncated importance sampling."""
    plain = CORRECTIONS["tis"]
    patch.setitem(
        CORRECTIONS, "tis", lambda ratio, replies, *, high: plain(ratio, replies, high=high * MORE)
    )


def value_clip(patch: pytest.MonkeyPatch) -> None:
    """The clip of the critic."""
    plain = losses.ValueObjective.__call__
    patch.setattr(
        losses.ValueObjective,
        "__call__",
        lambda self, *values: plain(replace(self, clip=self.clip * MORE), *values),
    )


def measured(place: Row, folder: Path) -> Found:
    """The objective that has all terms of the place's model, measured in this process."""
    named = {"PPO, both clips, dual clip, TIS, k3, entropy", "value loss, clip"}
    cases = [case for case in (*CASES, *VALUE_CASES) if case.name in named]
    (job,) = jobs([place], cases, folder)
    job.function(0, **job.arguments)
    (found,) = measure([place], cases, folder)
    return found


@pytest.mark.parametrize("place", [POLICY, CRITIC], ids=lambda place: place.name)
def test_the_objective_is_exact(place: Row, tmp_path: Path) -> None:
    found = measured(place, tmp_path)
    assert not found.beyond


@pytest.mark.parametrize(
    ("place", "mutate"),
    [
        (POLICY, clips),
        (POLICY, dual_clip),
        (POLICY, kl),
        (POLICY, truncation),
        (CRITIC, value_clip),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_term_that_is_one_percent_off_is_refused(
    place: Row,
    mutate: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    found = measured(place, tmp_path)
    assert "loss" in found.beyond  # a clipped token has no gradient, wherever the clip is
    assert found.share > 100  # and not by rounding
