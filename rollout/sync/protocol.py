"""Protocol of weight sync: what an engine asks of a trainer for its next weights, and what it is told then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollout.models.tensors import RowBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRoute:
    """Where an engine wants its next weights and how; plain values, so that it travels anywhere."""

    transport: str  # name in SENDERS
    place: str  # file, folder or URLs: what the transport needs to find the engine
    model: str  # Hugging Face folder whose tensors the weights have
    options: Mapping[str, Any] = field(default_factory=dict)  # the same for every update
    state: Mapping[str, Any] = field(default_factory=dict)  # what differs from update to update


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights that lie where the engine wanted them."""

    version: int
    transport: str
    place: str  # the route's, or what was written for this version below it
    checksums: Mapping[str, str]  # by the engine's names of its tensors; {} where nothing is compared
    bytes: int  # that were written
    seconds: float = 0.0  # that sending took


class WeightSender(Protocol):
    """A trainer's side of a transport; every rank has one and makes the same calls."""

    def send(self, weights: Iterable[tuple[str, RowBlocks]], version: int, state: Mapping[str, Any]) -> WeightUpdate:
        """Drain a stream of (Hugging Face name, full tensor or its blocks) into the route's place.

        Raises:
            EngineError: a tensor is missing, unknown or of another shape, or the engine does not take it.
        """
