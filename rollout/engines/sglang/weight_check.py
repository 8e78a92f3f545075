"""Comparison of the weights that the servers of one engine hold, by SGLang's own checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.base.errors import EngineError
from rollout.engines.sglang.replica import Replica

_PATH = "/weights_checker"


class WeightCheck:
    """Comparison of the weights of all servers after an update.

    SGLang returns a checksum of every tensor in a server's memory. The tensors are in the server's
    own layout, so a trainer cannot know their checksums, but servers that have taken the same
    update must return the same ones.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin without checksums.

        Args:
            tell: called with one line if the servers return no checksums.
        """
        self._tell = tell
        # True if the servers have `_PATH`; None until the first server is asked.
        self._available: bool | None = None
        self._url = ""  # URL of the first server checked after the present update
        self._checksums: list[dict[str, str]] = []  # its checksums by tensor name, for each rank

    def begin_update(self) -> None:
        """Forget the checksums of the update before."""
        self._checksums = []

    async def check(self, replica: Replica, version: int) -> None:
        """Compare the weights of a server after an update with those of the first server checked.

        Raises:
            EngineError: a tensor of the two servers differs.
        """
        if self._available is None:
            self._available = await replica.client.has(_PATH)
            if not self._available:
                self._tell(f"SGLang: the server has no {_PATH}; its weights are not compared")
        if not self._available:
            return

        answer: Any = await replica.client.call(_PATH, {"action": "checksum"})
        checksums = [rank["checksums"] for rank in answer["ranks"]]
        if not self._checksums:
            self._url = replica.client.url
            self._checksums = checksums
            return
        if len(checksums) != len(self._checksums):
            return  # the server has another tensor parallelism, and so other tensors per rank
        for rank, (first, other) in enumerate(zip(self._checksums, checksums, strict=True)):
            differing = sorted(name for name in first if first[name] != other.get(name))
            if differing:
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                raise EngineError(
                    f"SGLang: tensor '{differing[0]}'{more} of rank {rank} at version {version} is "
                    f"not the same in the servers at {self._url} and {replica.client.url}; the "
                    "weight sync is broken (engine.compare_servers: false skips this comparison)"
                )
