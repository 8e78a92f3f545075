"""Linear layers' products on the CPU: the numbers of plain ones, whoever multiplies and wherever gradients go."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.model import decoder
from mcore_mas.megatron.model.decoder import product
from tests.support import precision


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
    """As a layer calls it; Megatron's own product would be -1."""
    how = {
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "tp_group": None,
        "exact": False,
    } | how
    return decoder._linear(lambda *_, **__: torch.tensor(-1.0), x, weight, bias=bias, **how)


@pytest.mark.skipif(decoder._one_dnn is None, reason="torch is built without oneDNN")
def test_large_products_are_made_by_one_dnn_and_small_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    one_dnn = decoder._one_dnn
    assert one_dnn is not None

    def counted(x: Tensor, *arguments: Any) -> Tensor:
        made.append(x.shape)
        return one_dnn(x, *arguments)

    monkeypatch.setattr(decoder, "_one_dnn", counted)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 256, generator=draw)
    for rows, inputs, times in ((511, weight, 0), (512, weight, 1), (512, weight.t(), 2)):
        x = torch.randn(rows, 1, inputs.shape[1], generator=draw)
        precision.assert_close(product(x, inputs), x @ inputs.t(), x.double() @ inputs.double().t())
        assert len(made) == times
    for other in (torch.float64, torch.bfloat16):
        assert product(x.to(other), inputs.to(other)).dtype == other
    assert len(made) == 2


def test_a_weights_gradient_is_added_to_megatrons_buffer() -> None:
    x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]], requires_grad=True)  # two tokens
    weight = torch.nn.Parameter(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
    weight.main_grad, weight.grad_added_to_main_grad = torch.full((3, 2), 10.0), False  # type: ignore[attr-defined]
    out = linear(x, weight)
    assert out.tolist() == [[[1.0, 3.0, 4.0]], [[3.0, 7.0, 8.0]]]
    torch.autograd.backward([out], [torch.tensor([[[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])])
    assert x.grad is not None
    assert x.grad.tolist() == [[[1.0, 2.0]], [[1.0, 3.0]]]
    # row r: the tokens that it got a gradient from, summed
    assert weight.main_grad.tolist() == [[11.0, 12.0], [13.0, 14.0], [14.0, 16.0]]  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_without_a_buffer_it_is_the_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((3, 1, 4), (2, 4))
    )
    bias = torch.randn(2, generator=draw, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        linear, (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    )


def test_frozen_weights_and_exchanges_between_ranks_stay_megatrons() -> None:
    x, weight = torch.ones(1, 1, 2), torch.nn.Parameter(torch.ones(3, 2))
    assert linear(x, weight.detach()) == -1
    assert linear(x, weight, allreduce_dgrad=True) == -1
    assert linear(x, weight, sequence_parallel=True) == -1
