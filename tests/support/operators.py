"""Helpers for tests of operators: gradients, comparison, and compilation of Triton kernels for a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def output_and_gradients(
    compute: Callable[..., Tensor], grad_out: Tensor, *inputs: Tensor
) -> list[Tensor]:
    """Return compute(*inputs), and the gradients of the inputs for this gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = compute(*leaves)
    out.backward(grad_out.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_near(results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Assert that no element is off by more than `tolerance` times the largest expected element."""
    for result, expected_result in zip(results, expected, strict=True):
        error = float((result.cpu() - expected_result).abs().max())
        assert error <= tolerance * float(expected_result.abs().max())


def compile_for_gpu(expression: str) -> Any:
    """Evaluate an expression of functions of `tests.support.sm90`, and return its value as JSON.

    It runs in a process of its own, because Triton interprets kernels in the process of the tests.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"import json; from tests.support.sm90 import *; print(json.dumps({expression}))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])
