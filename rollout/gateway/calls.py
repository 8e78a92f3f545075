"""Calls of the gateway, with partial replies that streams and repeated requests read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.gateway.dialects import ChatReply
from rollout.gateway.errors import GatewayError
from rollout.models.tool_calls import split_thoughts

THOUGHT_END = "</think>"


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayCall:
    """A call whose reply is being sampled, or has been.

    Attributes:
        partial_reply: the reply as far as its text is final.
        task: task whose result is the complete reply.
        has_output: set once there is something to stream, or the task has ended.
        has_reader: True if somebody waits for the reply. The sampling of a stream without a reader
            ends early.
        is_aborted: True if the sampling ended early.
        turn: index of the reply's turn in the trajectory; -1 until it is complete.
    """

    partial_reply: ChatReply
    task: asyncio.Task[ChatReply] = field(init=False)
    has_output: asyncio.Event = field(default_factory=asyncio.Event)
    has_reader: bool = True
    is_aborted: bool = False
    turn: int = -1
    _has_grown: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, reply: Coroutine[Any, Any, ChatReply]) -> GatewayCall:
        """Start the coroutine that returns the complete reply; return this call."""
        self.task = asyncio.create_task(reply)
        self.task.add_done_callback(lambda _: self._wake_readers())
        return self

    def update(self, raw: str, end_marks: Sequence[str]) -> bool:
        """Update the partial reply.

        Args:
            raw: text sampled so far.
            end_marks: marks that may end the text (see `settled_text`).

        Returns:
            True if the sampling should continue.
        """
        current = self.partial_reply
        reasoning, text = settled_text(raw, end_marks)
        has_changed = (reasoning, text) != (current.reasoning, current.text)
        if has_changed and current.is_prefix_of(reasoning, text):
            self.partial_reply = replace(current, reasoning=reasoning, text=text)
            self._wake_readers()
        if not self.has_reader:
            self.is_aborted = True
        return not self.is_aborted

    def result(self) -> ChatReply:
        """Return the complete reply of the finished task.

        Raises:
            GatewayError: the task was cancelled.
            Exception: any error with which the task failed.
        """
        if self.task.cancelled():
            raise GatewayError(503, "the trajectory has ended")
        return self.task.result()

    async def snapshots(self) -> AsyncIterator[ChatReply]:
        """Yield the reply as it is now, again whenever it has grown, and at last the complete reply.

        Raises:
            GatewayError: the task was cancelled.
            Exception: any error with which the task failed.
        """
        while not self.task.done():
            self._has_grown.clear()
            yield self.partial_reply
            await self._has_grown.wait()
        yield self.result()

    def _wake_readers(self) -> None:
        self.has_output.set()
        self._has_grown.set()


def settled_text(raw: str, end_marks: Sequence[str]) -> tuple[str, str]:
    """Return the thoughts and the text of an incomplete reply that later tokens cannot change.

    Args:
        raw: text sampled so far.
        end_marks: marks at which the text may end: the caller's stops and the beginnings of tool
            calls. Text that may be the first part of a mark is held back.
    """
    thoughts, text = split_thoughts(raw)
    end = len(text)
    for mark in (*end_marks, THOUGHT_END):
        position = text.find(mark)
        if position < 0:
            position = len(text) - _overlap(text, mark)
        end = min(end, position)
    return thoughts, text[:end].rstrip()


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` with which the text ends."""
    for size in range(len(mark) - 1, 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
