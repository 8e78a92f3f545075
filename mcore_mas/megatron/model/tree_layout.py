"""Layout of tree attention: few calls of dense kernels, planned once per micro-batch for all layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_mas.megatron.batch import Segment

# torch's causal kernel on the CPU computes every pair of 128 queries and their keys and drops half of them: a longer
# segment is cut into blocks, and each half of them sees the other without a mask (512 tokens: half the time)
_CPU_BLOCK = 128
_CPU_MULTIPLE = 32  # of the kernel's blocks of queries
# attended to by a call of their own, tokens cost more than the call; fewer are padded together
_WORTH_A_CALL = 64


@dataclass(frozen=True, slots=True)
class CausalBlocks:
    """Blocks of equal length, each of which attends to itself, causally.

    Either they lie one after the other at `place`, or `rows` says where the tokens of each are: shorter ones are padded
    by their last token, which `present` leaves out.
    """

    length: int  # L
    place: slice | None = None
    rows: Tensor | None = None  # [B, L]
    present: Tensor | None = None  # [B, L] bool


@dataclass
class PackedTrees(PackedSeqParams):
    """The layout of one micro-batch, handed through Megatron to `TreeAttention`.

    `qkv_format` stays "sbhd" (one row of T tokens), which keeps Megatron from re-shaping for its own packed kernels.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = 0  # Megatron takes the larger of these two for the rotary length; TreeRotary needs neither
    max_seqlen_kv: int = 0
    own: tuple[CausalBlocks, ...] = field(default_factory=tuple)  # every token is in one of them
    seen: tuple[tuple[slice, slice], ...] = field(default_factory=tuple)  # queries, and keys that all of them see
    starts: Tensor | None = None  # [sequences + 1] int32, where none shares anything: the first token of each, and T
    longest: int = 0  # tokens of the longest segment

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> PackedTrees:
        """The layout of `segments` end to end, depth first: what continues a segment lies right behind it."""
        places = _places(segments)
        ends = [place.stop for place in places]
        for i in reversed(range(len(segments))):
            if segments[i].parent >= 0:
                ends[segments[i].parent] = max(ends[segments[i].parent], ends[i])
        block = _CPU_BLOCK if device.type == "cpu" else max(segment.tokens for segment in segments)
        blocks: list[slice] = []
        seen: list[tuple[slice, slice]] = []
        for place, end in zip(places, ends, strict=True):
            cut = _cut(place, block)
            blocks += cut
            seen += _halves(cut)
            if end > place.stop:
                seen.append((slice(place.stop, end), place))
        alone = all(segment.parent < 0 for segment in segments)
        starts = torch.tensor([0, *(place.stop for place in places)], dtype=torch.int32, device=device)
        return cls(
            own=tuple(_own(blocks, device)),
            seen=tuple(seen),
            starts=starts if alone else None,
            longest=max(segment.tokens for segment in segments),
        )


def _places(segments: Sequence[Segment]) -> list[slice]:
    places, start = [], 0
    for segment in segments:
        places.append(slice(start, start + segment.tokens))
        start += segment.tokens
    return places


def _cut(place: slice, longest: int) -> list[slice]:
    """A stretch in as few blocks as possible, about equally long."""
    tokens = place.stop - place.start
    if tokens <= longest:
        return [place]
    length = -(-tokens // -(-tokens // longest))
    length += -length % _CPU_MULTIPLE
    return [slice(start, min(start + length, place.stop)) for start in range(place.start, place.stop, length)]


def _halves(blocks: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """What the blocks of a segment see of it besides themselves: each half the one before it."""
    if len(blocks) > 1:
        half = (len(blocks) + 1) // 2
        yield slice(blocks[half].start, blocks[-1].stop), slice(blocks[0].start, blocks[half - 1].stop)
        yield from _halves(blocks[:half])
        yield from _halves(blocks[half:])


def _own(blocks: Sequence[slice], device: torch.device) -> Iterator[CausalBlocks]:
    """Neighbours of equal length in one call; what is too little for one is padded together with its like."""
    short: dict[int, list[slice]] = defaultdict(list)
    for length, run in groupby(blocks, key=lambda place: place.stop - place.start):
        members = list(run)
        place = slice(members[0].start, members[-1].stop)
        if place.stop - place.start >= _WORTH_A_CALL:
            yield CausalBlocks(length, place=place)
        else:
            short[length.bit_length()] += members
    for members in short.values():
        yield _padded(members, device)


def _padded(blocks: Sequence[slice], device: torch.device) -> CausalBlocks:
    if len(blocks) == 1:
        return CausalBlocks(blocks[0].stop - blocks[0].start, place=blocks[0])
    starts = torch.tensor([place.start for place in blocks])
    lengths = torch.tensor([place.stop - place.start for place in blocks])
    column = torch.arange(int(lengths.max()))
    rows = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
    present = column < lengths[:, None]
    return CausalBlocks(len(column), rows=rows.to(device), present=present.to(device))
