"""Specification of a trainer."""

import pytest

from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.spec import TrainerSpec


def test_a_value_head_without_a_value_objective_is_refused() -> None:
    message = "head 'value' with Objective; a value head goes with a ValueObjective"
    with pytest.raises(ValueError, match=message):
        TrainerSpec(model="m", head="value")


def test_a_critic_has_the_ranks_of_its_layout() -> None:
    spec = TrainerSpec(model="m", head="value", objective=ValueObjective(), tp=2, pp=2, dp=3)
    assert spec.ranks == 12
