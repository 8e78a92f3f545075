"""Recomputation, and random generators of parallel ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    """States of random generators by name; nothing is drawn here."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        """Return all states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Set all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state."""
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a state in this block."""
        yield


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Mark a block that is computed again."""
    yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Compute a function again in the backward pass, in the same precision."""
    recipe = FP8GlobalStateManager.recipe

    def in_fp8(*inputs: Any) -> Any:
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*inputs, **kwargs)

    return torch_checkpoint(in_fp8, *args, use_reentrant=use_reentrant)
