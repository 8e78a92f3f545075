"""Checks of a GPU's results against references; each prints a line with `ok` and the largest difference."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.machine import device, say, start_trainer, stop_trainer
from benchmarks.gpu.shapes import LAYOUTS, Forest

HEADS = 32
KV_HEADS = 8
DIM = 128
TINY_SHAPE = (2, 1, 16)  # heads, key and value heads, dimension of a head
# Accepted synchronisations of an update with one agent, by file: for its statistics, and for the norm
# of its gradient.
SYNCHRONISATIONS = Counter({"transfer.py": 1, "clip_grads.py": 1})
# Largest accepted gap between log-probabilities in bfloat16 and in float32, in nats by quantile:
# twice the gap on a CPU for this model.
GAPS = {0.5: 0.015, 0.99: 0.06, 0.999: 0.07}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
NORM_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

# Models whose updates are compared with those of the CPU
_CPU_MODELS = ("tiny", "tiny-moe")


def correctness(tiny: bool) -> None:
    """Run all checks: kernels against plain PyTorch, updates against other updates, and synchronisations."""
    _check_attention_against_torch(tiny)
    _check_attention_against_dense(tiny)
    _check_norm(tiny)
    _check_head(tiny)
    for check in (
        _check_repeated_updates,
        _check_updates_of_the_cpu,
        partial(_check_bfloat16, tiny=tiny),
    ):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))


def attention_inputs(
    forest: Forest, dtype: torch.dtype, shape: tuple[int, int, int], **tiles: int
) -> tuple[list[Tensor], Any, Any]:
    """Return random inputs of attention and the layouts of a forest.

    Args:
        forest: segments.
        dtype: data type of the inputs.
        shape: heads, key and value heads, dimension of a head.
        tiles: fields of `TileSizes` that replace the defaults.

    Returns:
        Queries, keys, values and a gradient of the output, each [tokens, heads, dim] with the number
        of its heads; the layout of Triton's kernels; and that of the implementation in PyTorch.
    """
    from mcore_mas.megatron.batch import Segment
    from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
    from mcore_mas.megatron.transfer import upload

    heads, kv_heads, dim = shape
    segments = [Segment(tokens=tokens, parent=parent) for tokens, parent, _ in forest]
    tokens = sum(segment.tokens for segment in segments)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, head_count, dim, generator=generator)
        for head_count in (heads, kv_heads, kv_heads, heads)
    ]
    default_sizes = TileSizes.of(heads // kv_heads, dim, dtype == torch.bfloat16)
    triton_layout = PackedTrees.of(segments, sizes=replace(default_sizes, **tiles))
    torch_layout = PackedTrees.of(segments, device().type)
    return (
        [tensor.to(device(), dtype) for tensor in inputs],
        upload(triton_layout, device()),
        upload(torch_layout, device()),
    )


def gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of a function and the gradients of its inputs.

    Args:
        attend: the function.
        inputs: its arguments, and last the gradient of the output.
    """
    *arguments, output_gradient = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in arguments]
    output = attend(*leaves)
    output.backward(output_gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _largest_error(results: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Return the largest difference, as a share of the largest element of the same reference."""
    errors = [
        float((result.float() - reference.float()).abs().max() / reference.abs().max())
        for result, reference in zip(results, references, strict=True)
    ]
    return max(errors)


def _are_equal(results: Sequence[Tensor], references: Sequence[Tensor]) -> bool:
    """Return True if all tensors are equal to the bit."""
    return all(map(torch.equal, results, references))


def _check_kernel(
    case: Mapping[str, Any],
    kernel: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    references: Sequence[Tensor],
    tolerance: float,
) -> None:
    """Compare a kernel's output and gradients with references, and with those of a second call.

    Args:
        case: names of the case, for the result line.
        kernel: the function.
        inputs: its arguments, and last the gradient of its output.
        references: the expected output and gradients.
        tolerance: largest error, as a share of the largest element of the same reference.
    """
    results = gradients(kernel, inputs)
    worst = _largest_error(results, references)
    same_bits = _are_equal(results, gradients(kernel, inputs))
    say(**case, worst=worst, same_bits=same_bits, ok=worst <= tolerance and same_bits)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_attention_against_torch(tiny: bool) -> None:
    """Compare the kernel with the implementation in PyTorch in float32, and with itself."""
    from mcore_mas.megatron.model.block_attention import BlockAttention
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    shape = TINY_SHAPE if tiny else (HEADS, KV_HEADS, DIM)
    layouts = ["small"] if tiny else ["small", "groups", "turns"]
    for layout in layouts:
        for dtype, tolerance in TOLERANCES.items():
            inputs, triton_layout, torch_layout = attention_inputs(LAYOUTS[layout], dtype, shape)

            def attend_triton(*arguments: Tensor, plan: Any = triton_layout.block_plan) -> Tensor:
                return KernelAttention.apply(*arguments, plan, DIM**-0.5)

            def attend_torch(*arguments: Tensor, layout: Any = torch_layout) -> Tensor:
                return BlockAttention.apply(*arguments, layout, DIM**-0.5)

            references = gradients(attend_torch, [tensor.float() for tensor in inputs])
            case = {"what": "attention", "layout": layout, "dtype": _dtype_name(dtype)}
            _check_kernel(case, attend_triton, inputs, references, tolerance)


def _check_attention_against_dense(tiny: bool) -> None:
    """Compare the kernel with PyTorch's attention under a mask over all pairs of tokens."""
    from mcore_mas.megatron.model.tree_ops import KernelAttention

    shape = TINY_SHAPE if tiny else (8, 2, DIM)
    heads, _, _ = shape
    forests = {"small": LAYOUTS["small"]}
    if not tiny:
        forests["first of turns"] = LAYOUTS["turns"][:65]
    for layout, forest in forests.items():
        inputs, triton_layout, _ = attention_inputs(forest, torch.float32, shape)
        mask = _attention_mask(forest).to(device())

        def attend_triton(*arguments: Tensor, plan: Any = triton_layout.block_plan) -> Tensor:
            return KernelAttention.apply(*arguments, plan, DIM**-0.5)

        def attend_dense(*arguments: Tensor, mask: Tensor = mask) -> Tensor:
            query, key, value = (
                tensor.repeat_interleave(heads // tensor.shape[1], 1).transpose(0, 1)[None]
                for tensor in arguments
            )
            output = F.scaled_dot_product_attention(query, key, value, mask, scale=DIM**-0.5)
            return output[0].transpose(0, 1)

        results = gradients(attend_triton, inputs)
        references = gradients(attend_dense, inputs)
        worst = _largest_error(results, references)
        ok = worst <= TOLERANCES[torch.float32]
        say(what="attention, dense", layout=layout, tokens=len(mask), worst=worst, ok=ok)


def _attention_mask(forest: Forest) -> Tensor:
    """Return a mask [T, T]: a token attends to its segment up to itself, and to all segments above."""
    starts = torch.tensor([0, *(tokens for tokens, _, _ in forest)]).cumsum(0).tolist()
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for number, (tokens, parent, _) in enumerate(forest):
        rows = slice(starts[number], starts[number + 1])
        mask[rows, rows] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        ancestor = parent
        while ancestor >= 0:
            mask[rows, starts[ancestor] : starts[ancestor + 1]] = True
            ancestor = forest[ancestor][1]
    return mask


def _check_norm(tiny: bool) -> None:
    """Compare the norms of keys and of hidden states, and sums with their norms, with PyTorch in float64."""
    from mcore_mas.megatron.model.layer_ops import KernelNorm, KernelSumAndNorm

    sizes = ((9, 16), (5, 64)) if tiny else ((131_072, 128), (16_384, 2560))
    for rows, width in sizes:
        for dtype, tolerance in NORM_TOLERANCES.items():
            drawn = [torch.randn(shape) for shape in ((rows, width), (width,), (rows, width))]
            inputs = [tensor.to(device(), dtype) for tensor in drawn]
            exact_inputs = [tensor.to(torch.float64) for tensor in inputs]

            def normalise(x: Tensor, weight: Tensor) -> Tensor:
                return KernelNorm.apply(x, weight, 1e-6)

            def normalise_exactly(x: Tensor, weight: Tensor) -> Tensor:
                return F.rms_norm(x, weight.shape, weight, 1e-6)

            references = gradients(normalise_exactly, exact_inputs)
            case = {"what": "norm", "width": width, "dtype": _dtype_name(dtype)}
            _check_kernel(case, normalise, inputs, references, tolerance)

            # Both results are joined, and so are their gradients.
            def add_and_normalise(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
                return torch.cat(KernelSumAndNorm.apply(x, residual, weight, 1e-6))

            def add_and_normalise_exactly(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
                total = x + residual
                return torch.cat([total, normalise_exactly(total, weight)])

            x, weight, grad_out = inputs
            # Powers of two, so that the sum is not rounded
            residual = torch.full_like(x, 2.0**-6) * x.round()
            sum_inputs = [x.round(), residual, weight, torch.cat([grad_out, grad_out])]
            references = gradients(
                add_and_normalise_exactly, [tensor.to(torch.float64) for tensor in sum_inputs]
            )
            case["what"] = "sum and norm"
            _check_kernel(case, add_and_normalise, sum_inputs, references, tolerance)


def _check_head(tiny: bool) -> None:
    """Compare the output layer in three chunks with one that computes all logits at once in float64.

    A result may differ by twice as much as that of plain PyTorch in the same data type: in bfloat16,
    the error of the largest gradient depends on the processor and on the drawn numbers.
    """
    from mcore_mas.megatron.model import head as output_layer
    from mcore_mas.megatron.spec import init_process_groups

    init_process_groups(rank=0, threads=torch.get_num_threads())
    rows, hidden, padded_vocab = (60, 64, 512) if tiny else (1536, 1024, 32_768)
    vocab = padded_vocab - 12
    chunk_bytes = 4 * padded_vocab * rows // 3
    torch.manual_seed(0)
    labels = torch.randint(vocab, (rows,)).to(device())
    temperatures, *output_gradients = (torch.rand(rows).add(0.5).to(device()) for _ in range(3))

    def gradients_of_rows(_: Tensor, __: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        grad_logprobs, grad_entropies = output_gradients
        return grad_logprobs[chunk], grad_entropies[chunk]

    def results_of_pytorch(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute all logits at once, in the data type of `x`, and the rest in float32 or more."""
        x = x.detach().clone().requires_grad_()
        weight = weight.detach().clone().requires_grad_()
        logits = x @ weight.t()
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        all_logprobs = (logits[:, :vocab] / temperatures[:, None]).log_softmax(-1)
        logprobs = all_logprobs.gather(1, labels[:, None])[:, 0]
        entropies = -(all_logprobs * all_logprobs.exp()).sum(-1)
        torch.autograd.backward(
            (logprobs, entropies), [gradient.to(logprobs.dtype) for gradient in output_gradients]
        )
        return _head_results((logprobs, entropies), x.grad, weight.grad)

    for dtype, tolerance in TOLERANCES.items():
        drawn_x = torch.randn(rows, hidden).to(device(), dtype)
        drawn_weight = (torch.randn(padded_vocab, hidden) * 2 * hidden**-0.5).to(device(), dtype)
        references = results_of_pytorch(drawn_x.double(), drawn_weight.double())
        plain_errors = _errors_by_name(results_of_pytorch(drawn_x, drawn_weight), references)

        for one_pass in (False, True):
            x = drawn_x.detach().clone().requires_grad_()
            weight = torch.nn.Parameter(drawn_weight.detach().clone())
            weight.main_grad = torch.zeros(padded_vocab, hidden, device=device())  # type: ignore[attr-defined]
            with patch.dict(output_layer.CHUNK_BYTES, dict.fromkeys(("cpu", "cuda"), chunk_bytes)):
                outputs = output_layer.logprobs_and_entropy(
                    x,
                    weight,
                    labels,
                    temperatures,
                    vocab,
                    is_embedding=False,
                    exact=False,
                    row_gradients=gradients_of_rows if one_pass else None,
                )
                torch.autograd.backward(outputs, output_gradients)

            results = _head_results(outputs, x.grad, weight.main_grad)  # type: ignore[attr-defined]
            errors = _errors_by_name(results, references)
            ok = all(
                error <= max(tolerance, 2 * plain_errors[name]) for name, error in errors.items()
            )
            say(what="head", dtype=_dtype_name(dtype), one_pass=one_pass, **errors, ok=ok)
    stop_trainer()


def _head_results(
    outputs: tuple[Tensor, Tensor], grad_x: Tensor | None, grad_weight: Tensor | None
) -> dict[str, Tensor]:
    """Return the log-probabilities and entropies of a head and both gradients, by name."""
    assert grad_x is not None and grad_weight is not None
    logprobs, entropies = (output.detach() for output in outputs)
    return {
        "logprobs": logprobs,
        "entropies": entropies,
        "of_x": grad_x,
        "of_weight": grad_weight,
    }


def _errors_by_name(
    results: Mapping[str, Tensor], references: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return `_largest_error` of each result."""
    return {name: _largest_error([results[name]], [references[name]]) for name in references}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Updates:
    """Result of two updates.

    Attributes:
        norms: gradient norm of each.
        weights: after them.
        synchronisations: synchronisations of the second update, by file and line.
    """

    norms: list[float]
    weights: list[Tensor]
    synchronisations: Counter[str]


def _check_repeated_updates(folder: Path) -> None:
    """Check that two updates repeat to the bit: again, after sleep, and after a restart; count synchronisations."""
    first = _run_two_updates(folder, "saves")
    for variant in ("again", "sleeps", "restores"):
        updates = _run_two_updates(folder, variant)
        ok = (
            updates.norms == first.norms[-len(updates.norms) :]
            and min(updates.norms) > 0
            and _are_equal(updates.weights, first.weights)
        )
        say(what=f"update, {variant}", norms=updates.norms, ok=ok)
    if torch.cuda.is_available():
        by_line = first.synchronisations
        by_file: Counter[str] = Counter()
        for line, count in by_line.items():
            by_file[line.partition(":")[0]] += count
        say(what="waits", **by_line, ok=len(by_line) > 0 and by_file <= SYNCHRONISATIONS)


def _run_two_updates(folder: Path, variant: str) -> _Updates:
    """Run two updates of a new trainer.

    Args:
        folder: folder for the model and the checkpoint.
        variant: "saves": save a checkpoint after the first update; "restores": only run the second
            one, from that checkpoint; "sleeps": sleep before each update; "again": nothing else.
    """
    is_gpu = torch.cuda.is_available()
    trainer, batches = start_trainer(folder, "tiny", "small", count=2, bf16=is_gpu)
    norms: list[float] = []
    synchronisations: Counter[str] = Counter()
    if variant == "restores":
        trainer.restore(folder / "saved")
    for _ in range(trainer.updates, 2):
        if variant == "sleeps":
            trainer.sleep()
            trainer.wake()
        synchronisations.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if is_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            norms.append(trainer.update(batches)["grad_norm"])
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")
        for warning in caught:
            if "synchroniz" in str(warning.message):
                synchronisations[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
        if variant == "saves" and trainer.updates == 1:
            trainer.save(folder / "saved")
            trainer.wait_written()
    weights = [tensor.detach().cpu().clone() for tensor in trainer.model.all_parameters.values()]
    stop_trainer()
    return _Updates(norms=norms, weights=weights, synchronisations=synchronisations)


def _check_updates_of_the_cpu(folder: Path) -> None:
    """Compare log-probabilities and gradients in float32 with those of a process that sees no GPU."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.checks", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    for model in _CPU_MODELS:
        references = torch.load(_update_file(folder, model), weights_only=True)
        results = _float32_update(folder, model)
        for name in ("logprobs", "gradients"):
            worst = _largest_error(results[name], references[name])
            ok = worst <= TOLERANCES[torch.float32]
            say(what=f"update, {name} of the CPU", model=model, worst=worst, ok=ok)


def _update_file(folder: Path, model: str) -> Path:
    return folder / f"update_{model}.pt"


def _float32_update(folder: Path, model: str) -> dict[str, list[Tensor]]:
    """Return the log-probabilities and the gradients of one update in float32."""
    trainer, batches = start_trainer(folder, model, "small", count=2)
    logprobs = trainer.score(batches)
    trainer.update(batches)
    parameters = trainer.model.trained_parameters.values()
    parameter_gradients = [parameter.main_grad.detach().cpu().clone() for parameter in parameters]
    stop_trainer()
    return {"logprobs": logprobs, "gradients": parameter_gradients}


def _check_bfloat16(folder: Path, tiny: bool) -> None:
    """Compare log-probabilities in bfloat16 with those in float32, over 100,000 tokens."""
    model, layout, count = ("tiny", "small", 1) if tiny else ("0.5b", "groups", 7)
    logprobs = {}
    for bf16 in (False, True):
        trainer, batches = start_trainer(folder, model, layout, count=count, bf16=bf16)
        logprobs[bf16] = torch.cat(trainer.score(batches))
        del trainer
        stop_trainer()
    gap = (logprobs[True] - logprobs[False]).abs()
    quantiles = {quantile: round(float(gap.quantile(quantile)), 6) for quantile in GAPS}
    say(
        what="bfloat16",
        tokens=len(gap),
        **{str(quantile): value for quantile, value in quantiles.items()},
        mean=round(float(gap.mean()), 6),
        most=float(gap.max()),
        ok=all(quantiles[quantile] <= bound for quantile, bound in GAPS.items()),
    )


def main(folder: Path) -> None:
    """Save the updates that `_check_updates_of_the_cpu` compares with."""
    for model in _CPU_MODELS:
        torch.save(_float32_update(folder, model), _update_file(folder, model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
