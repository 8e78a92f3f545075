"""Selective recomputation on a GPU: outputs that are freed until the backward pass reads them.

Megatron's `CheckpointWithoutOutput` does the same for any function. It runs a nested backward pass,
and in some versions copies what it has computed. A kernel that writes to a given tensor needs neither.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def free_until_backward(
    tensor: Tensor, write: Callable[[Tensor], Any], *, reader_output: Tensor
) -> None:
    """Free the memory of a tensor, and fill it again in the backward pass of the operation that read it.

    Nothing is freed if there is no backward pass.

    Args:
        tensor: only this operation saves it, and nothing reads it between forward and backward pass.
        write: writes the same numbers to a tensor of the same shape.
        reader_output: output of the operation.
    """
    if reader_output.requires_grad:
        reader_output.register_hook(_FreedTensor(tensor, write).fill)


class _FreedTensor:
    """Tensor whose memory is free until `fill` is called."""

    def __init__(self, tensor: Tensor, write: Callable[[Tensor], Any]) -> None:
        # Autograd would take a change of the tensor for an error. An alias has another version counter.
        self._alias: Tensor | None = tensor.data
        self._write: Callable[[Tensor], Any] | None = write
        self._bytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)

    def fill(self, _: Tensor) -> None:
        """Allocate the memory and write the numbers; a hook of a gradient."""
        assert self._alias is not None and self._write is not None, "a hook is called once"
        self._alias.untyped_storage().resize_(self._bytes)
        self._write(self._alias)
        # The hook lives as long as the graph, and must not hold the memory for that long.
        self._alias = None
        self._write = None
