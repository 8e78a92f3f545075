"""Products of linear layers on a CPU: oneDNN's and torch's results, and where gradients of weights are accumulated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_mas.megatron.model import linear
from mcore_mas.megatron.model.linear import linear_product, trained_linear
from tests.support import precision

MEGATRON_RESULT = -1.0


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Call a linear layer as Megatron does; return `MEGATRON_RESULT` if it leaves the product to Megatron."""
    defaults = {
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "tp_group": None,
        "exact": False,
    }
    return trained_linear(
        lambda *_, **__: torch.tensor(MEGATRON_RESULT), x, weight, bias=bias, **defaults | options
    )


@pytest.mark.skipif(linear._one_dnn_linear is None, reason="torch is built without oneDNN")
def test_large_products_are_made_by_one_dnn_and_small_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    one_dnn_linear = linear._one_dnn_linear
    assert one_dnn_linear is not None

    def recording_linear(x: Tensor, *arguments: Any) -> Tensor:
        shapes.append(x.shape)
        return one_dnn_linear(x, *arguments)

    monkeypatch.setattr(linear, "_one_dnn_linear", recording_linear)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 256, generator=generator)
    for rows, weight, expected_calls in ((511, matrix, 0), (512, matrix, 1), (512, matrix.t(), 2)):
        x = torch.randn(rows, 1, weight.shape[1], generator=generator)
        in_double = x.double() @ weight.double().t()
        precision.assert_close(linear_product(x, weight), x @ weight.t(), in_double)
        assert len(shapes) == expected_calls

    for dtype in (torch.float64, torch.bfloat16):
        assert linear_product(x.to(dtype), weight.to(dtype)).dtype == dtype
    assert len(shapes) == 2


def test_a_weights_gradient_is_added_to_megatrons_buffer() -> None:
    x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]], requires_grad=True)  # two tokens
    weight: Any = torch.nn.Parameter(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
    weight.main_grad = torch.full((3, 2), 10.0)
    weight.grad_added_to_main_grad = False

    out = apply_linear(x, weight)
    assert out.tolist() == [[[1.0, 3.0, 4.0]], [[3.0, 7.0, 8.0]]]

    grad_out = torch.tensor([[[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])
    torch.autograd.backward([out], [grad_out])
    assert x.grad is not None
    assert x.grad.tolist() == [[[1.0, 2.0]], [[1.0, 3.0]]]
    # Row r is 10 and the sum of the tokens that output r has a gradient from.
    assert weight.main_grad.tolist() == [[11.0, 12.0], [13.0, 14.0], [14.0, 16.0]]
    assert weight.grad_added_to_main_grad


def test_without_a_buffer_it_is_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, 1, 4), (2, 4), (2,))
    )
    assert torch.autograd.gradcheck(apply_linear, (x, weight, bias))


def test_frozen_weights_and_exchanges_between_ranks_stay_megatrons() -> None:
    x = torch.ones(1, 1, 2)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert apply_linear(x, weight.detach()) == MEGATRON_RESULT
    assert apply_linear(x, weight, allreduce_dgrad=True) == MEGATRON_RESULT
    assert apply_linear(x, weight, sequence_parallel=True) == MEGATRON_RESULT
