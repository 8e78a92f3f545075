"""Actor's side of an embedded engine that runs in a Ray actor."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rollout.base.errors import EngineError
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.gpu_decoder import make_decoder
from rollout.engines.embedded.settings import EmbeddedSettings
from rollout.models.adapter_weights import AdapterShape
from rollout.models.architecture import read_architecture
from rollout.models.grammars import Grammars
from rollout.models.tensors import checksum, compare_checksums, read_tensors
from rollout.sync.shared import SharedWeights


@dataclass(slots=True, kw_only=True)
class WeightSlot:
    """Full weights of an actor, or one of its adapters.

    The buffer of the weights has two halves: the actor uses the weights in one, and the next update
    is written to the other.

    Attributes:
        file: file in shared memory that has the buffer. The trainer writes updates to it; with the
            transport "disk", the actor reads them into it from a folder. None: the buffer is memory
            of the actor alone.
        adapter: shape of the adapter; None for the full weights.
        version: version that the actor computes from.
        half: half of the buffer that has this version, 0 or 1; None before the first update.
    """

    file: Path | None
    adapter: AdapterShape | None = None
    version: int = 0
    half: int | None = None

    @property
    def free_half(self) -> int:
        """Half of the buffer that the next update is written to."""
        if self.half is None:
            return 0  # a new decoder loads the weights of the model's folder into half 1
        return 1 - self.half


class EngineActor(EmbeddedEngine):
    """Embedded engine as a Ray actor, with the weights in shared memory."""

    def __init__(self, settings: EmbeddedSettings, slots: Sequence[WeightSlot]) -> None:
        """Load the weights from shared memory, or from the model's folder before the first update.

        Args:
            slots: the full weights, and then every adapter.
        """
        torch.set_num_threads(settings.threads)
        architecture = read_architecture(settings.folder)
        self._shared = [SharedWeights(slot.file, architecture, slot.adapter) for slot in slots]
        weights, *adapters = slots
        decoder = make_decoder(
            architecture,
            settings.max_length,
            self._shared[0].halves,
            device=settings.device,
            adapters=[slot.adapter for slot in adapters if slot.adapter is not None],
            bf16=settings.bf16,
        )
        if weights.half is None:
            decoder.load(read_tensors(settings.folder), str(settings.folder))
        else:
            decoder.adopt(weights.half)
        super().__init__(
            decoder,
            rows=settings.rows,
            version=weights.version,
            deterministic=settings.deterministic,
            routing=settings.routing,
            grammars=Grammars(settings.folder),
        )
        # The client sets the interrupt flag in the files of all slots, so the first file is enough.
        for shared in self._shared:
            if shared.file is not None:
                self.interrupt = shared.interrupt
                break
        for number, slot in enumerate(adapters, 1):
            if slot.half is not None:
                self.adopt_adapter(number, self._shared[number].halves[slot.half], slot.version)

    def commit(
        self, half: int, version: int, checksums: dict[str, str], number: int, folder: str
    ) -> None:
        """Compare new weights with the trainer's checksums, and decode with them.

        Args:
            half: half of the buffer that has the weights, or into which they are read.
            version: their version.
            checksums: the trainer's checksums, by name of the tensor.
            number: number of the adapter; 0 for the full weights.
            folder: folder to read the weights from; "" if the trainer has written them into `half`.

        Raises:
            EngineError: the weights cannot be read from `folder`, are of another version, or differ
                from the trainer's, or an adapter has infinite values or NaN. The engine then keeps its
                present weights.
        """
        shared = self._shared[number]
        if folder:
            shared.versions[half] = -1
            shared.halves[half].fill(read_tensors(folder), folder)
            shared.versions[half] = version
        if shared.versions[half] != version:
            raise EngineError(
                f"the shared weights hold version {shared.versions[half]}; expected {version}"
            )
        engine_checksums = {
            name: checksum(tensor) for name, tensor in shared.halves[half].tensors()
        }
        compare_checksums(engine_checksums, checksums, version)
        if number:
            self.adopt_adapter(number, shared.halves[half], version)
        else:
            self.adopt(half, version)

    def pid(self) -> int:
        """Return the actor's process id."""
        return os.getpid()

    def counters(self) -> dict[str, float]:
        """Return the engine's `Stats` by field name."""
        return asdict(self.stats)
