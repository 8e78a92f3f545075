"""Layout of tree attention for a micro-batch: blocks for torch's kernels, or a plan of tiles for Triton's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_mas.megatron.batch import Segment, depths

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
    filled: Tensor | None = None  # [tokens] which elements of the flat [B · L] are present
    tokens: Tensor | None = None  # [tokens] and their tokens


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes of a Triton kernel's tiles, and how many heads share a key/value head: tokens · `group` are rows."""

    group: int
    rows: int  # of the forward pass and the gradient of queries, at least as many as `group`
    keys: int
    rows_kv: int  # of the gradients of keys and values
    keys_kv: int

    @classmethod
    def of(cls, group: int, head_dim: int, bf16: bool, room: int = 227) -> TileSizes:
        """What compiles for an H200 without spilled registers, or nearly (tests/unit/megatron/test_kernels.py).

        Args:
            room: KiB of a GPU's shared memory, of which wide heads have few keys at a time where there is little.
        """
        if bf16 and head_dim <= 128:
            return cls(group, max(128, _above(group)), 64, max(64, _above(group)), 64)
        keys = 16 if bf16 and room <= 129 * _above(head_dim) // 256 else 32
        return cls(group, max(64, _above(group)), keys, max(32, _above(group)), 32)

    @staticmethod
    def least_room(head_dim: int, bf16: bool) -> int:
        """KiB of shared memory that tiles of such heads want, as compiled for GPUs with little of it (sm_80, sm_89)."""
        width = max(64, _above(head_dim))
        return (160 if not bf16 else 97 if width <= 128 else 49) * width // 128


def _above(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Which blocks of queries and keys meet; made once for all layers, on the host, from T ends alone.

    Read by keys, a key is seen by the one stretch of queries up to its end, and a block of keys by the stretch up to
    its farthest. Read by queries, the blocks of keys are scattered, and listed.
    """

    sizes: TileSizes
    ends: Tensor  # [T] int32, the first token behind the subtree of each token's segment
    seen: Tensor  # [meetings] int32, the blocks of keys of each block of queries, first those that need no mask
    begin: Tensor  # [blocks of queries + 1] int32, into `seen`
    masked: Tensor  # [blocks of queries] int32, into `seen`: from here on blocks need the mask
    nearest: Tensor  # [blocks of keys] int32, the smallest end in each
    farthest: Tensor  # [blocks of keys] int32, the largest

    @classmethod
    def of(cls, lengths: Sequence[int], ends: Sequence[int], sizes: TileSizes) -> BlockPlan:
        """Of segments depth first: their lengths, and the first token behind the subtree of each."""
        end = np.repeat(np.asarray(ends, dtype=np.int32), lengths)
        near, far = _extremes(end, sizes.keys)
        first = np.arange(0, len(end), sizes.rows // sizes.group)[:, None]
        stop = np.minimum(first + sizes.rows // sizes.group, len(end))
        key = sizes.keys * np.arange(len(near))
        visible = (key < stop) & (far > first)
        full = visible & (key + sizes.keys - 1 <= first) & (near >= stop)
        block, column = np.nonzero(visible)
        order = np.lexsort((column, ~full[block, column], block))
        begin = np.concatenate([[0], np.cumsum(visible.sum(1))])
        columns = (
            end,
            column[order],
            begin,
            begin[:-1] + full.sum(1),
            *_extremes(end, sizes.keys_kv),
        )
        return cls(
            sizes, *(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in columns)
        )


def _extremes(end: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest end of each block of keys; a key missing in the last ends at 0."""
    blocks = np.pad(end, (0, -len(end) % keys)).reshape(-1, keys)
    return blocks.min(1), blocks.max(1)


@dataclass
class PackedTrees(PackedSeqParams):
    """The layout of one micro-batch, handed through Megatron to `TreeAttention`.

    `qkv_format` stays "sbhd" (one row of T tokens), which keeps Megatron from re-shaping for its own packed kernels.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = (
        0  # Megatron takes the larger of these two for the rotary length; TreeRotary needs neither
    )
    max_seqlen_kv: int = 0
    own: tuple[CausalBlocks, ...] = field(default_factory=tuple)  # every token is in one of them
    seen: tuple[tuple[slice, slice], ...] = field(
        default_factory=tuple
    )  # queries, and keys that all of them see
    paths: tuple[tuple[slice, ...], ...] = field(
        default_factory=tuple
    )  # on a CPU, of each segment from its root
    plan: BlockPlan | None = None  # in place of both, for Triton's kernel
    starts: Tensor | None = (
        None  # [sequences + 1] int32, where none shares anything: the first token of each, and T
    )
    longest: int = 0  # tokens of the longest segment
    positions: int = 0  # tokens of the longest sequence
    predictors: Tensor | None = (
        None  # [n] this rank's tokens that predict something, where only they leave the last layer
    )
    routing: Tensor | None = None  # [tokens of this rank, sparse layers, k], see `RoutingReplay`

    @classmethod
    def of(
        cls, segments: Sequence[Segment], kind: str = "cpu", sizes: TileSizes | None = None
    ) -> PackedTrees:
        """The layout of `segments` end to end, depth first: what continues a segment lies right behind it.

        Its tensors are on the CPU.

        Args:
            kind: of device that torch's kernels will run on.
            sizes: of the tiles of Triton's kernel, if that is to attend.
        """
        lengths = [segment.tokens for segment in segments]
        ends = list(accumulate(lengths))
        places = [slice(end - tokens, end) for tokens, end in zip(lengths, ends, strict=True)]
        paths: list[tuple[slice, ...]] = []
        for segment, place in zip(segments, places, strict=True) if kind == "cpu" else ():
            paths.append((*(paths[segment.parent] if segment.parent >= 0 else ()), place))
        for i in reversed(range(len(segments))):
            if segments[i].parent >= 0:
                ends[segments[i].parent] = max(ends[segments[i].parent], ends[i])
        alone = all(segment.parent < 0 for segment in segments)
        own, seen = (
            ((), ())
            if sizes
            else _calls(places, ends, _CPU_BLOCK if kind == "cpu" else max(lengths))
        )
        return cls(
            own=own,
            seen=seen,
            paths=tuple(paths),
            plan=BlockPlan.of(lengths, ends, sizes) if sizes else None,
            starts=torch.tensor([0, *(place.stop for place in places)], dtype=torch.int32)
            if alone
            else None,
            longest=max(lengths),
            positions=max(map(sum, zip(depths(segments), lengths, strict=True))),
        )


def _calls(
    places: Sequence[slice], ends: Sequence[int], longest: int
) -> tuple[tuple[CausalBlocks, ...], tuple[tuple[slice, slice], ...]]:
    """`own` and `seen` of a layout, for kernels that attend from one block of queries to one of keys."""
    blocks: list[slice] = []
    seen: list[tuple[slice, slice]] = []
    for place, end in zip(places, ends, strict=True):
        cut = _cut(place, longest)
        blocks += cut
        seen += _halves(cut)
        if end > place.stop:
            seen.append((slice(place.stop, end), place))
    return tuple(_own(blocks)), tuple(seen)


def _cut(place: slice, longest: int) -> list[slice]:
    """A stretch in as few blocks as possible, about equally long."""
    tokens = place.stop - place.start
    if tokens <= longest:
        return [place]
    length = -(-tokens // -(-tokens // longest))
    length += -length % _CPU_MULTIPLE
    return [
        slice(start, min(start + length, place.stop))
        for start in range(place.start, place.stop, length)
    ]


def _halves(blocks: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """What the blocks of a segment see of it besides themselves: each half the one before it."""
    if len(blocks) > 1:
        half = (len(blocks) + 1) // 2
        yield (
            slice(blocks[half].start, blocks[-1].stop),
            slice(blocks[0].start, blocks[half - 1].stop),
        )
        yield from _halves(blocks[:half])
        yield from _halves(blocks[half:])


def _own(blocks: Sequence[slice]) -> Iterator[CausalBlocks]:
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
        yield _padded(members)


def _padded(blocks: Sequence[slice]) -> CausalBlocks:
    if len(blocks) == 1:
        return CausalBlocks(blocks[0].stop - blocks[0].start, place=blocks[0])
    starts = torch.tensor([place.start for place in blocks])
    lengths = torch.tensor([place.stop - place.start for place in blocks])
    column = torch.arange(int(lengths.max()))
    rows = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
    present = column < lengths[:, None]
    filled = present.flatten().nonzero()[:, 0]
    return CausalBlocks(
        len(column), rows=rows, present=present, filled=filled, tokens=rows.flatten()[filled]
    )
