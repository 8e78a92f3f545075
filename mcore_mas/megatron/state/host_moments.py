"""Adam's moments in host memory: each weight's moments visit the GPU while it is stepped."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mcore_mas.megatron.host_memory import pinned_buffers

# Names of Adam's moments in its state.
MOMENTS = ("exp_avg", "exp_avg_sq")

# Host tensors of each stepped weight, by moment, of the weight's shape in float32.
HostMoments: TypeAlias = Mapping[Tensor, Mapping[str, Tensor]]


def keep_moments_on_host(optimizer: Any) -> HostMoments:
    """Make a Megatron optimizer keep the moments of weights on a GPU in host memory.

    Args:
        optimizer: result of `make_optimizer`; the `step` of its Adams is replaced.

    Returns:
        The host memory, for `OptimizerState`.
    """
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for chained in optimizer.chained_optimizers:
        adam = chained.optimizer
        if adam is None:
            continue
        adam_moments = _allocate_moments(adam)
        adam.step = partial(step_by_weight, adam, adam.step, adam_moments)
        moments |= adam_moments
    return moments


def _allocate_moments(adam: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Allocate page-locked memory for the moments of all weights that are on a GPU."""
    weights: list[Tensor] = []
    for group in adam.param_groups:
        weights += [weight for weight in group["params"] if weight.device.type != "cpu"]
    buffers = iter(pinned_buffers(4 * weight.numel() for weight in weights for _ in MOMENTS))
    moments: dict[Tensor, dict[str, Tensor]] = {}
    # The buffers come in descending order of size.
    for weight in sorted(weights, key=Tensor.numel, reverse=True):
        moments[weight] = {
            moment: next(buffers).view(torch.float32).view(weight.shape) for moment in MOMENTS
        }
    return moments


def step_by_weight(adam: Any, step: Callable[[], object], host_moments: HostMoments) -> None:
    """Step one weight after the other; the moments of a weight are on its device while it is stepped.

    Adam steps every weight independently, so the result has the bits of a single call. An Adam
    that counts its steps in a group, as Transformer Engine's does, counts one step for all weights.

    Args:
        adam: optimizer that steps the weights in its `param_groups`.
        step: the original `adam.step`.
        host_moments: moments that are on the host, by weight; those of other weights stay in `adam.state`.
    """
    groups = adam.param_groups
    weights = iter([weight for group in groups for weight in group["params"]])
    visits = _Visits(adam.state, host_moments)
    visits.fetch(next(weights, None))
    try:
        for group in groups:
            single_group = dict(group)
            for weight in group["params"]:
                single_group = {**group, "params": [weight]}
                adam.param_groups = [single_group]
                visits.await_fetched()
                visits.fetch(next(weights, None))
                step()
                visits.send_back(weight)
            # Keep what the last of these steps has changed in the group, such as a step count.
            single_group.pop("params")
            group.update(single_group)
    finally:
        adam.param_groups = groups
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # wait until the copies are complete


class _Visits:
    """Copies of moments to a GPU and back, on a CUDA stream for each direction.

    While a weight is stepped, the moments of the next weight arrive, and those of the previous one
    leave: three weights have moments on the GPU. Their memory belongs to the current stream. So the
    other streams wait for the current stream before they write, and the current stream waits for them
    before the memory is freed.
    """

    def __init__(self, state: dict[Tensor, dict[str, Any]], host_moments: HostMoments) -> None:
        """Prepare the visits of one step.

        Args:
            state: Adam's state by weight. It holds the tensors on the GPU during a visit, and else
                those on the host.
            host_moments: moments that are on the host, by weight.
        """
        self._state = state
        self._host_moments = host_moments
        has_gpu = torch.cuda.is_available()
        self._to_device_stream = torch.cuda.Stream() if has_gpu else None
        self._to_host_stream = torch.cuda.Stream() if has_gpu else None
        # Moments on the GPU of the weight that was stepped last, and the end of their copies to the
        # host.
        self._sent_moments: list[Tensor] = []
        self._sent_event: torch.cuda.Event | None = None

    def fetch(self, weight: Tensor | None) -> None:
        """Start to copy the moments of a weight to its device.

        Do nothing for None, or before the first step of a weight, when it has no moments.
        """
        if weight is None:
            return
        state = self._state.get(weight, {})
        # Allocate on the current stream, and copy on the other.
        on_device = {
            moment: torch.empty_like(host_tensor, device=weight.device)
            for moment, host_tensor in self._host_moments.get(weight, {}).items()
            if moment in state
        }
        with _after_current(self._to_device_stream):
            for moment, device_tensor in on_device.items():
                device_tensor.copy_(state[moment], non_blocking=True)
        state.update(on_device)

    def await_fetched(self) -> None:
        """Make the current stream wait for the moments that were fetched."""
        if self._to_device_stream is not None:
            torch.cuda.current_stream().wait_stream(self._to_device_stream)

    def send_back(self, weight: Tensor) -> None:
        """Start to copy the moments of a weight to the host, and free those of the previous weight."""
        state = self._state.get(weight, {})
        moments = []
        with _after_current(self._to_host_stream):
            for moment, host_tensor in self._host_moments.get(weight, {}).items():
                if moment in state:
                    moments.append(state[moment])
                    state[moment] = host_tensor.copy_(state[moment], non_blocking=True)

        # The moments of the previous weight are freed here, once they have been copied.
        if self._sent_event is not None:
            torch.cuda.current_stream().wait_event(self._sent_event)
        self._sent_moments = moments
        if self._to_host_stream is not None:
            self._sent_event = self._to_host_stream.record_event()


@contextlib.contextmanager
def _after_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch the block's operations on a stream, after those that the current stream has; None: no GPU."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
