"""Record of a trajectory's calls that a restart must not repeat, such as sending a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from rollout.records.collection_log import CollectionLog

_T = TypeVar("_T")


class CallRecord:
    """Results of one trajectory's calls that cost money or have effects outside the run.

    Environments and tools get the record as the argument `calls`. A call that is wrapped in `once`
    is not repeated when the trajectory is played again after a restart. Without a log, as in an
    evaluation, every call is made.
    """

    def __init__(
        self,
        log: CollectionLog | None = None,
        trajectory: str = "",
        branch: Callable[[], str] = lambda: "",
    ) -> None:
        """Initialize the record of one trajectory.

        Args:
            log: log of the results; None: nothing is recorded, and every call is made.
            trajectory: name of the trajectory in the log.
            branch: returns a name of the current branch of a tree, which distinguishes equal calls
                of different branches.
        """
        self._log = log
        self._trajectory = trajectory
        self._branch = branch
        self._counts: Counter[str] = Counter()

    def for_branch(self, branch: Callable[[], str]) -> CallRecord:
        """Return the record of another branch of the tree, which counts its calls from 1."""
        return CallRecord(self._log, self._trajectory, branch)

    async def once(
        self, result_type: Any, call: Callable[[], Awaitable[_T]], *identity: object
    ) -> _T:
        """Return the recorded result of a call; if none is recorded, make the call and record its result.

        Equal calls of a trajectory are distinguished by their order. A call that raised, or had not
        returned when the run was killed, is made again.

        Args:
            result_type: type that the result is read back as.
            call: coroutine function that makes the call.
            identity: values that identify the call, such as a tool's name and its arguments.
        """
        if self._log is None:
            return await call()
        identity_json = to_json([self._trajectory, self._branch(), *identity]).decode()
        self._counts[identity_json] += 1
        key = f"{identity_json} {self._counts[identity_json]}"

        if self._log.has_call(key):
            result: _T = _adapter(result_type).validate_python(self._log.call_result(key))
            return result
        result = await call()
        self._log.add_call(key, result)
        return result


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
