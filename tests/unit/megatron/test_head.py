"""Log-probabilities and entropies: Triton's kernels of the head compared with the head on a CPU."""

import pytest
import torch

from mcore_mas.megatron.model.head import ChunkedHead
from mcore_mas.megatron.model.layer_ops import KernelHead
from tests.support.operators import assert_near, compile_for_gpu

triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="needs TRITON_INTERPRET=1, which tests/conftest.py sets on a machine without a GPU",
)


@interpreted
@pytest.mark.parametrize("with_entropy", [False, True])
def test_kernels_compute_the_results_of_the_cpu(with_entropy: bool, one_rank: None) -> None:
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

    results = []
    for kernels in (False, True):
        hidden = initial_hidden.clone().requires_grad_()
        weight = torch.nn.Parameter(initial_weight.clone())
        if kernels:
            chunks = [slice(0, 4), slice(4, 7)]
            previous_gradient = torch.ones(columns, hidden_size)
            weight.main_grad = previous_gradient.clone()  # type: ignore[attr-defined]
            logprobs, entropy = KernelHead.apply(
                hidden, weight, labels, temperatures, vocab, False, chunks
            )
        else:
            logprobs, entropy = ChunkedHead.apply(
                hidden, weight, labels, temperatures, vocab, False, False
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
def test_a_head_that_embeds_leaves_its_gradient_to_the_embedding(one_rank: None) -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(16, 8))
    main_grad = torch.zeros(16, 8)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    labels = torch.tensor([1, 2, 3])
    logprobs, _ = KernelHead.apply(hidden, weight, labels, torch.ones(3), 16, True, [slice(0, 3)])
    logprobs.sum().backward()
    assert weight.grad is None
    assert not hasattr(weight, "grad_added_to_main_grad")
    # The gradient of a row's logits, [j = l] − p_j, sums to 0, and so does that of the weight's rows.
    assert float(main_grad.sum(0).abs().max()) < 1e-5
    assert float(main_grad.abs().max()) > 1e-5


@pytest.mark.slow
def test_kernels_for_an_h200_do_not_spill() -> None:
    kernels = compile_for_gpu("head_kernels()")
    assert [kernel["spilled"] for kernel in kernels] == [0, 0]
    # Four programs of 256 threads share the registers of a multiprocessor.
    assert max(kernel["registers"] for kernel in kernels) <= 64
