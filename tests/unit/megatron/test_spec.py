"""Specification of a trainer."""

from typing import Any

import pytest
import torch

from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.model.build import check_fp8_support
from mcore_mas.megatron.spec import TrainerSpec
from rollout.base.errors import ModelError


def test_a_value_head_without_a_value_objective_is_refused() -> None:
    message = "head 'value' with Objective; a value head goes with a ValueObjective"
    with pytest.raises(ValueError, match=message):
        TrainerSpec(model="m", head="value")


def test_a_critic_has_the_ranks_of_its_layout() -> None:
    spec = TrainerSpec(model="m", head="value", objective=ValueObjective(), tp=2, pp=2, dp=3)
    assert spec.ranks == 12


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, 1),
        ({"tp": 2}, 1),
        ({"tp": 2, "sp": True, "cp": 3}, 6),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "tp": 2, "sp": True}, 64),
        ({"fp8_recipe": "blockwise"}, 1),
    ],
)
def test_micro_batches_have_a_multiple_of_tokens(settings: dict[str, Any], multiple: int) -> None:
    assert TrainerSpec(model="", **settings).token_multiple == multiple


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    check_fp8_support("blockwise")
    with pytest.raises(ModelError) as caught:
        check_fp8_support("mxfp8")
    assert str(caught.value) == (
        "fp8_recipe: mxfp8 needs a GPU of compute capability 10.0, and NVIDIA H100 has 9.0; use fp8: null"
    )
