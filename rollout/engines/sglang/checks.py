"""A server's checksums against the trainer's, as far as the form of its tensors is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from rollout.engines.sglang.replica import Replica
from rollout.engines.sglang.settings import Settings
from rollout.transports.digest import SGLang, kind_of, layer_of, of_rank
from rollout.transports.manifest import compare

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.transports.handover import Handover


class Checks:
    """Compares what servers hold after an update.

    Kernels may want weights in another order, and a server may have been given other arguments than it is known here.
    So the first layer of the model, which a server has read itself, is compared before anything is handed over: only
    tensors of a kind whose checksums were repeated rightly then are compared later.
    """

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        """`tell` is called with one line if there are tensors that will not be compared."""
        self._settings, self._tell = settings, tell
        self._kinds: frozenset[str] | None = None if settings.held else frozenset()

    async def learn(self, replica: Replica) -> None:
        """Find out, while the server still has the weights of the folder, what can be compared."""
        if self._kinds is not None:
            return
        if not await replica.client.has("/weights_checker"):
            self._kinds = frozenset()
            self._tell("SGLang: the server has no /weights_checker; its weights are not compared with the trainer's")
            return
        said, known = await asyncio.gather(self._said(replica), asyncio.to_thread(self._known))
        kinds = {kind_of(name) for name in said}
        wrong = {kind_of(name) for name, value in known.items() if said.get(name) != value}
        self._kinds = frozenset({kind_of(name) for name in known} - wrong)
        if left := sorted(kinds - self._kinds):
            self._tell(f"SGLang: {left[0]} and {len(left) - 1} more kinds are in a form of its own and not compared")

    async def check(self, replica: Replica, handover: Handover) -> None:
        """Compare.

        Raises:
            EngineError: a tensor is not the trainer's; its name.
        """
        if self._kinds and handover.checksums:
            right = {name: value for name, value in handover.checksums.items() if kind_of(name) in self._kinds}
            compare(await self._said(replica), right, handover.version)

    async def _said(self, replica: Replica) -> dict[str, str]:
        answer: Any = await replica.client.call("/weights_checker", {"action": "checksum"})
        tp = self._settings.tp
        return {
            of_rank(name, number % tp, tp): value
            for number, rank in enumerate(answer["ranks"])
            for name, value in rank["checksums"].items()
        }

    def _known(self) -> dict[str, str]:
        digest = SGLang(**self._settings.held)
        for name, tensor in self._sample():
            digest.add(name, tensor)
        return digest.finish()

    def _sample(self) -> Iterator[tuple[str, Tensor]]:
        """The first layer's tensors, and those of none."""
        for file in sorted(self._settings.folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if layer_of(name) in (None, 0):
                        yield name, tensors.get_tensor(name)
