"""Log-probabilities and entropies: Triton's kernels of the head compared with the head on a CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from mcore_mas.megatron.model.column_masks import ColumnMasks
from mcore_mas.megatron.model.head import ChunkedHead, logprobs_and_entropy
from mcore_mas.megatron.model.head_ops import KernelHead, OnePassHead
from tests.support.operators import assert_near

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)


def column_masks(is_allowed: torch.Tensor, columns: int) -> ColumnMasks:
    """Return masks of rows that allow the tokens `is_allowed` [rows, V]."""
    masks = torch.from_numpy(np.packbits(is_allowed.numpy(), axis=1, bitorder="little"))
    return ColumnMasks(masks=masks, rows=torch.arange(len(masks)), first_column=0, columns=columns)


@pytest.mark.parametrize("triton_kernels", [False, pytest.param(True, marks=interpreted)])
def test_a_mask_renormalises_over_the_allowed_tokens(
    triton_kernels: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 0 to 4 have the odds 1 to 5; the first row allows tokens 1 and 2, the second only 3."""
    monkeypatch.setattr("mcore_mas.megatron.model.head.use_triton", lambda device: triton_kernels)
    odds = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weight = odds.log()[:, None].requires_grad_()
    results: dict[str, Any] = {}
    for name, rows in {"two tokens": [0], "one token": [1]}.items():
        logprobs, entropy = logprobs_and_entropy(
            torch.ones(1, 1),
            weight,
            torch.tensor([1 if rows == [0] else 3]),
            torch.ones(1),
            5,
            is_embedding=False,
            exact=False,
            masks=torch.tensor([[0b00110], [0b01000]], dtype=torch.uint8),
            mask_rows=torch.tensor(rows),
        )
        (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
        results[name] = logprobs.item(), entropy.item(), gradient[:, 0].tolist()

    logprob, entropy_of_two, gradient_of_two = results["two tokens"]
    assert logprob == pytest.approx(np.log(2 / 5), rel=1e-6)
    assert entropy_of_two == pytest.approx(-(0.4 * np.log(0.4) + 0.6 * np.log(0.6)), rel=1e-6)
    assert gradient_of_two == pytest.approx([0, 0.6, -0.6, 0, 0], rel=1e-6)
    assert [gradient_of_two[token] for token in (0, 3, 4)] == [0, 0, 0]
    # The only token that is allowed has the probability 1, whatever the weights are.
    assert results["one token"] == (0.0, 0.0, [0.0] * 5)


@interpreted
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_kernels_compute_the_results_of_the_cpu(
    with_entropy: bool, masked: bool, one_pass: bool, one_rank: None
) -> None:
    rows = 7
    hidden_size = 12
    columns = 80
    vocab = 67  # the other 13 columns are padding
    draw = torch.Generator().manual_seed(0)
    initial_hidden = torch.randn(rows, hidden_size, generator=draw)
    initial_weight = torch.randn(columns, hidden_size, generator=draw)
    labels = torch.randint(vocab, (rows,), generator=draw)
    labels[0] = -3  # belongs to another rank, which would add its logit
    temperatures = torch.rand(rows, generator=draw) + 0.5
    grad_logprobs, grad_entropy = torch.randn(2, rows, generator=draw)
    masks = None
    if masked:
        is_allowed = torch.rand(rows, 96, generator=draw) < 0.3
        is_allowed[torch.arange(rows), labels.clamp(0)] = True
        masks = column_masks(is_allowed, vocab)

    def row_gradients(
        logprobs: torch.Tensor, entropy: torch.Tensor, chunk: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return grad_logprobs[chunk], grad_entropy[chunk] if with_entropy else None

    results = []
    for kernels in (False, True):
        hidden = initial_hidden.clone().requires_grad_()
        weight = torch.nn.Parameter(initial_weight.clone())
        if kernels:
            chunks = [slice(0, 4), slice(4, 7)]
            previous_gradient = torch.ones(columns, hidden_size)
            weight.main_grad = previous_gradient.clone()  # type: ignore[attr-defined]
            arguments = (hidden, weight, labels, temperatures, vocab, False, chunks, masks)
            if one_pass:
                logprobs, entropy = OnePassHead.apply(*arguments, row_gradients)
            else:
                logprobs, entropy = KernelHead.apply(*arguments)
        else:
            logprobs, entropy = ChunkedHead.apply(
                hidden, weight, labels, temperatures, vocab, False, False, masks
            )
        loss = (logprobs * grad_logprobs).sum()
        if with_entropy:
            loss = loss + (entropy * grad_entropy).sum()
        loss.backward()

        grad_weight = weight.grad
        if kernels:
            assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
            grad_weight = weight.main_grad - previous_gradient  # type: ignore[attr-defined]
        assert grad_weight is not None
        assert hidden.grad is not None
        results.append([logprobs.detach()[1:], entropy.detach(), hidden.grad, grad_weight])

    on_cpu, with_kernels = results
    assert_near(with_kernels, on_cpu, 3e-6)
    grad_of_padding = with_kernels[3][vocab:]
    assert not grad_of_padding.any()


@interpreted
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_head_that_embeds_leaves_its_gradient_to_the_embedding(
    one_pass: bool, one_rank: None
) -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(16, 8))
    main_grad = torch.zeros(16, 8)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    labels = torch.tensor([1, 2, 3])
    chunks = [slice(0, 3)]
    arguments = (hidden, weight, labels, torch.ones(3), 16, True, chunks, None)
    if one_pass:
        logprobs, _ = OnePassHead.apply(*arguments, lambda *_: (torch.ones(3), None))
    else:
        logprobs, _ = KernelHead.apply(*arguments)
    logprobs.sum().backward()
    assert weight.grad is None
    assert not hasattr(weight, "grad_added_to_main_grad")
    # The gradient of a row's logits, [j = l] − p_j, sums to 0, and so does that of the weight's rows.
    assert float(main_grad.sum(0).abs().max()) < 1e-5
    assert float(main_grad.abs().max()) > 1e-5
