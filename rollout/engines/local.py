"""The embedded engine in this process, behind the asynchronous protocol."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engines.embedded import EmbeddedEngine
from rollout.engines.protocol import Completion, EngineError, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class LocalEngine:
    """Runs an `EmbeddedEngine` on the event loop's thread, one step at a time between other coroutines."""

    def __init__(
        self, folder: Path | str, *, max_length: int, rows: int = 192, version: int = 0, device: str = "cpu"
    ) -> None:
        """Load the Hugging Face model in `folder`; the arguments are those of `EmbeddedEngine.from_folder`."""
        self.core = EmbeddedEngine.from_folder(folder, max_length=max_length, rows=rows, version=version, device=device)
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._ids = itertools.count()
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion; concurrent calls are batched.

        Raises:
            EngineError: the request cannot be served (too long, bad token ids or sampling).
        """
        request_id = next(self._ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.core.submit(request_id, prompt_ids, sampling)
        self._waiting[request_id] = future
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self.core.abort({request_id})
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; running generations go on with the new ones.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape; the old weights stay.
        """
        self.core.load_weights(tensors, version)

    async def _run(self) -> None:
        try:
            while self.core.has_work:
                for request_id, outcome in self.core.step():
                    settle(self._waiting.get(request_id), outcome)
                await asyncio.sleep(0)  # whoever got an answer may now ask again
        except Exception as error:
            # Nobody awaits this task: whatever broke must reach those who wait for a completion.
            self.core.reset()
            for future in self._waiting.values():
                settle(future, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise


def settle(future: asyncio.Future[Completion] | None, outcome: Completion | EngineError) -> None:
    """Give a waiting call its outcome, unless it has gone."""
    if future is None or future.done():
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
