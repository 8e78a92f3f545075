"""Simulated CUDA streams and events, which show whether work on one stream waits for another, and a clock.

Each stream counts its operations. For every other stream, it records how many operations of that other
stream must end before its own next operation begins.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

META = torch.device("meta")

HOST_WAITS: Counter[str] = Counter()  # waits of the host for the device, by calling function
_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


def calling_function() -> str:
    """Return the file and name of the innermost function of the project or of Megatron."""
    for frame, _ in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if any(part in path for part in ("/mcore_mas/", "/rollout/", "/megatron/core/")):
            return f"{Path(path).name} {frame.f_code.co_name}"
    return "?"


class Clock:
    """Clocks of the host and of the device's compute stream during an update.

    Attributes:
        host_s: seconds on the host's clock.
        device_s: end of the last kernel, on the same clock.
        idle_s: seconds in which no kernel runs between two others.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all clocks to 0."""
        for stream in list(_STREAMS):
            stream.end_s = 0.0
        self.host_s = 0.0
        self.device_s = 0.0
        self.idle_s = 0.0

    def launch(self, host_s: float, device_s: float) -> None:
        """Let the host launch kernels in `host_s` seconds that take `device_s` seconds."""
        self.host_s += host_s
        gap_s = max(0.0, self.host_s - self.device_s)
        self.idle_s += gap_s
        self.device_s += gap_s + device_s

    def wait(self) -> None:
        """Advance the host's clock to the end of all work on the device."""
        ends = [stream.end_s for stream in list(_STREAMS)]
        self.host_s = max(self.host_s, self.device_s, *ends)


CLOCK = Clock()


def count_wait() -> None:
    """Count a wait of the host for the device, by calling function."""
    HOST_WAITS[calling_function()] += 1
    CLOCK.wait()


class Stream:
    """Simulated CUDA stream.

    Attributes:
        current: stream that operations are launched on.
        default: stream that is current at first.
        operations: number of operations that the stream was given.
        end_s: end of the last copy on this stream, on the clock of the host. Kernels, and copies on the
            default stream, are on the device's clock.
        after: by other stream, how many of that stream's operations end before the next one here.
    """

    current: Stream
    default: Stream
    cuda_stream = 0
    device = META

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations = 0
        self.end_s = 0.0
        self.after: defaultdict[Stream, int] = defaultdict(int)
        _STREAMS.add(self)

    def comes_after(self, other: Stream, operations: int) -> bool:
        """Return True if the first `operations` of `other` end before the next operation here."""
        return other is self or self.after[other] >= operations

    def launch_copy(self, host_s: float, copy_s: float) -> None:
        """Let the host launch a copy in `host_s` seconds that takes `copy_s` seconds."""
        if self is Stream.default:
            CLOCK.launch(host_s, copy_s)
        else:
            CLOCK.host_s += host_s
            self.end_s = max(self.end_s, CLOCK.host_s) + copy_s

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, operations in event.after.items():
            self.after[stream] = max(self.after[stream], operations)
        if self is Stream.default:
            CLOCK.device_s = max(CLOCK.device_s, event.end_s)
        else:
            self.end_s = max(self.end_s, event.end_s)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        count_wait()
        # Everything that the host launches from now on comes after this stream.
        for stream in _STREAMS:
            stream.wait_stream(self)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._previous = Stream.current
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._previous


class Event:
    """Simulated CUDA event.

    Attributes:
        after: by stream, the number of its operations that end before the event.
        end_s: time of the event, on the clock of the host.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: dict[Stream, int] = {}
        self.end_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        self.after = {**stream.after, stream: stream.operations}
        self.end_s = CLOCK.device_s if stream is Stream.default else stream.end_s

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        count_wait()
        for stream in _STREAMS:
            stream.wait_event(self)

    def query(self) -> bool:
        return True


Stream.default = Stream()
Stream.current = Stream.default


def synchronize(*_: Any) -> None:
    """Let the host wait for all streams of the device; replaces `torch.cuda.synchronize`."""
    count_wait()
    for stream in list(_STREAMS):
        for other in list(_STREAMS):
            stream.wait_stream(other)
