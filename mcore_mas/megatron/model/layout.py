"""Layout of attention over a micro-batch, for torch's kernels or for Triton's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_mas.megatron.batch import Segment, depths

# Up to about 512 tokens, a causal call of torch's kernel on the CPU takes as long as one without a mask:
# it computes all pairs of queries and keys, and drops half of them. A longer segment than `_CPU_BLOCK`
# is therefore cut into blocks of at most this length. Within a block attention is causal; to earlier
# blocks it needs no mask (see `_pair_halves`). Forward and backward passes over 512 tokens then take
# 0.7 to 0.8 of the time.
_CPU_BLOCK = 128

# A GPU with at least this many KiB of shared memory for a program is taken to multiply with wgmma: H100
# and H200 have 227, an A100 has 163. With wgmma, each of the two groups of warps multiplies 64 keys of a
# tile; if a tile had 64, both would multiply the same ones.
_MIN_WGMMA_KIB = 200

# Blocks of queries in the CPU's kernel are a multiple of this number of tokens.
_CPU_MULTIPLE = 32

# A run of equally long blocks with at least this number of tokens in all gets a call of its own, which
# costs less than padding.
_MIN_CALL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class CausalBlocks:
    """B blocks of equal length L, each of which attends to itself causally, in one call.

    Either the blocks lie end to end, and only `length` and `token_range` are set. Or blocks that are
    shorter than L are padded by repeating their last token, and all but `token_range` are set.

    Attributes:
        length: L.
        token_range: range of the tokens of all blocks.
        block_tokens: [B, L] index of the token at each position of a block.
        is_present: [B, L] bool, False for padding.
        present_positions: [n] indices into the flat [B · L] of the n positions that are not padding.
        present_tokens: [n] indices of the tokens at these positions.
    """

    length: int
    token_range: slice | None = None
    block_tokens: Tensor | None = None
    is_present: Tensor | None = None
    present_positions: Tensor | None = None
    present_tokens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes of the tiles of Triton's attention kernels.

    A tile of queries has a row for each token and each of the `group` query heads that share a
    key/value head.

    Attributes:
        group: number of query heads that share a key/value head.
        rows: rows of a query tile in the forward kernel and in the kernel of the queries' gradient;
            at least `group`.
        keys: keys of a key tile in these kernels.
        rows_kv: rows of a query tile in the kernel of the gradients of keys and values.
        keys_kv: keys of a key tile in that kernel.
    """

    group: int
    rows: int
    keys: int
    rows_kv: int
    keys_kv: int

    @classmethod
    def of(cls, group: int, head_dim: int, bf16: bool, shared_memory_kib: int = 227) -> TileSizes:
        """Return sizes with which the kernels compile without spilled registers.

        tests/unit/megatron/test_compiled_kernels.py checks this in bfloat16, for an H200 and an L40S.

        Args:
            group: number of query heads that share a key/value head.
            head_dim: width of a head.
            bf16: True for bfloat16 tensors, False for float32.
            shared_memory_kib: shared memory that a program may use on the GPU; the default is that of
                an H100 or H200. Where it is small, bfloat16 kernels have smaller tiles: `keys` is
                smaller for heads wider than 128, `keys_kv` for others.
        """
        padded_group = _next_power(group)
        if bf16 and head_dim <= 128:
            return cls(
                group,
                rows=max(128, padded_group),
                keys=64,
                rows_kv=max(64, padded_group),
                keys_kv=128 if shared_memory_kib >= _MIN_WGMMA_KIB else 64,
            )
        # With 32 keys, bfloat16 kernels for heads of 256 take 101 KiB compiled for sm_80 and sm_89,
        # and 129 for sm_90. The larger number is required of every GPU, in proportion to the width.
        has_memory_for_32_keys = shared_memory_kib > 129 * _next_power(head_dim) // 256
        return cls(
            group,
            rows=max(64, padded_group),
            keys=32 if has_memory_for_32_keys or not bf16 else 16,
            rows_kv=max(32, padded_group),
            keys_kv=32,
        )

    @staticmethod
    def min_shared_memory_kib(head_dim: int, bf16: bool) -> int:
        """Return the KiB of shared memory that a GPU must have for the kernels of heads of this width.

        Compiled for sm_80 and sm_89, the kernels take 161 KiB for float32 heads of 128, and 97 for
        bfloat16 heads of 128. bfloat16 heads of 256 take 83 KiB with the 16 keys that `of` chooses
        where shared memory is small; to leave a margin, 98 are returned for these. The need is taken
        to be proportional to the width, rounded up to a power of two and at least 64.
        """
        if not bf16:
            kib_per_128_columns = 161
        elif head_dim <= 128:
            kib_per_128_columns = 97
        else:
            kib_per_128_columns = 49
        width = max(64, _next_power(head_dim))
        return -(-kib_per_128_columns * width // 128)


def _next_power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Pairs of a block of queries and a block of keys that Triton's kernels compute.

    The plan is made on the host, once for all layers. The queries that attend to a key are one
    range, from the key's token to the end of the subtree of its segment. The queries that attend to
    any key of a block are one range as well: the kernel of the gradients of keys and values goes
    through this range. The forward kernel and the kernel of the queries' gradient go through the
    blocks of keys that a block of queries attends to. These are scattered, so they are listed.

    Attributes:
        sizes: sizes of the tiles.
        ends: [T] int32, first token after the subtree of each token's segment.
        key_blocks: [pairs] int32, the blocks of keys that each block of queries attends to; those
            that need no mask come first.
        key_block_offsets: [blocks of queries + 1] int32, first index into `key_blocks` of each
            block of queries, and last the number of pairs.
        first_masked: [blocks of queries] int32, first index into `key_blocks` of a block that needs
            the mask; the next offset if none does.
        smallest_end_kv: [blocks of `sizes.keys_kv` keys] int32, the smallest of `ends` in each; 0 in
            a last block that is not full.
        largest_end_kv: [blocks of `sizes.keys_kv` keys] int32, the largest of `ends` in each.
    """

    sizes: TileSizes
    ends: Tensor
    key_blocks: Tensor
    key_block_offsets: Tensor
    first_masked: Tensor
    smallest_end_kv: Tensor
    largest_end_kv: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], ends: Sequence[int], sizes: TileSizes) -> BlockPlan:
        """Plan the attention over segments, which are in depth-first order.

        Args:
            lengths: number of tokens of each segment.
            ends: first token after the subtree of each segment.
            sizes: sizes of the tiles.
        """
        token_ends = np.repeat(np.asarray(ends, dtype=np.int32), lengths)
        smallest_end, largest_end = _extreme_ends(token_ends, sizes.keys)

        # A query tile has `group` rows for each token.
        tokens_per_block = sizes.rows // sizes.group

        # A row of these matrices is a block of queries, a column a block of keys.
        first_query = np.arange(0, len(token_ends), tokens_per_block)[:, None]
        stop_query = np.minimum(first_query + tokens_per_block, len(token_ends))
        first_key = sizes.keys * np.arange(len(smallest_end))
        is_visible = (first_key < stop_query) & (largest_end > first_query)
        is_before = first_key + sizes.keys - 1 <= first_query
        is_unmasked = is_visible & is_before & (smallest_end >= stop_query)

        # Pairs are sorted by block of queries; of each, the unmasked blocks of keys come first.
        # np.lexsort takes the most significant key last.
        query_block, key_block = np.nonzero(is_visible)
        needs_mask = ~is_unmasked[query_block, key_block]
        order = np.lexsort((key_block, needs_mask, query_block))
        offsets = np.concatenate([[0], np.cumsum(is_visible.sum(1))])
        smallest_end_kv, largest_end_kv = _extreme_ends(token_ends, sizes.keys_kv)
        return cls(
            sizes=sizes,
            ends=_int32_tensor(token_ends),
            key_blocks=_int32_tensor(key_block[order]),
            key_block_offsets=_int32_tensor(offsets),
            first_masked=_int32_tensor(offsets[:-1] + is_unmasked.sum(1)),
            smallest_end_kv=_int32_tensor(smallest_end_kv),
            largest_end_kv=_int32_tensor(largest_end_kv),
        )


def _int32_tensor(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))


def _extreme_ends(ends: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest end in each block of keys; padding keys end at 0."""
    blocks = np.pad(ends, (0, -len(ends) % keys)).reshape(-1, keys)
    return blocks.min(1), blocks.max(1)


@dataclass
class PackedTrees(PackedSeqParams):
    """Layout of a micro-batch, which Megatron hands to `TreeAttention`.

    `qkv_format` stays "sbhd" (a batch of one, with T tokens), so that Megatron does not reshape for
    its own packed kernels. Megatron reads `max_seqlen_q` and `max_seqlen_kv` for the length of the
    rotary embedding, which `TreeRotary` does not need.

    Attributes:
        causal_blocks: blocks of tokens that attend to themselves; every token is in one block.
        unmasked_pairs: ranges of queries and of keys; each of the queries attends to all the keys.
        paths: by segment, the token ranges from the root of its tree to it; set on a CPU only.
        block_plan: plan for Triton's kernels, in place of `causal_blocks` and `unmasked_pairs`.
        sequence_starts: [sequences + 1] int32, first token of each sequence, and T; None if
            sequences share tokens.
        longest_sequence: number of tokens of the longest sequence, from a root to a leaf.
        predictors: [n] tokens of this rank that predict a label; set if the other tokens do not
            leave the last layer.
        routing: [tokens of this rank, sparse layers, k] recorded experts, see `EngineRoutingReplay`.
    """

    qkv_format: str = "sbhd"
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    causal_blocks: tuple[CausalBlocks, ...] = ()
    unmasked_pairs: tuple[tuple[slice, slice], ...] = ()
    paths: tuple[tuple[slice, ...], ...] = ()
    block_plan: BlockPlan | None = None
    sequence_starts: Tensor | None = None
    longest_sequence: int = 0
    predictors: Tensor | None = None
    routing: Tensor | None = None

    @classmethod
    def of(
        cls, segments: Sequence[Segment], device_type: str = "cpu", sizes: TileSizes | None = None
    ) -> PackedTrees:
        """Lay out segments end to end; the tensors are on the CPU.

        Args:
            segments: depth first: a segment is followed by its descendants.
            device_type: type of the device that torch's kernels will run on, "cpu" or "cuda".
            sizes: sizes of the tiles of Triton's kernels; None: torch's kernels are used.
        """
        lengths = [segment.tokens for segment in segments]
        stops = list(accumulate(lengths))
        ranges = [slice(stop - tokens, stop) for tokens, stop in zip(lengths, stops, strict=True)]
        subtree_ends = _subtree_ends(segments, stops)

        layout = cls(
            longest_sequence=max(
                depth + tokens for depth, tokens in zip(depths(segments), lengths, strict=True)
            )
        )
        if device_type == "cpu":
            layout.paths = _paths(segments, ranges)
        if sizes is not None:
            layout.block_plan = BlockPlan.of(lengths, subtree_ends, sizes)
        else:
            max_block_tokens = _CPU_BLOCK if device_type == "cpu" else max(lengths)
            layout.causal_blocks, layout.unmasked_pairs = _attention_calls(
                ranges, subtree_ends, max_block_tokens
            )
        if all(segment.parent < 0 for segment in segments):
            starts = [0, *(token_range.stop for token_range in ranges)]
            layout.sequence_starts = torch.tensor(starts, dtype=torch.int32)
        return layout


def _paths(segments: Sequence[Segment], ranges: Sequence[slice]) -> tuple[tuple[slice, ...], ...]:
    """Return the token ranges from the root to each segment."""
    paths: list[tuple[slice, ...]] = []
    for segment, token_range in zip(segments, ranges, strict=True):
        parent_path = paths[segment.parent] if segment.parent >= 0 else ()
        paths.append((*parent_path, token_range))
    return tuple(paths)


def _subtree_ends(segments: Sequence[Segment], stops: Sequence[int]) -> list[int]:
    """Return the first token after the subtree of each segment."""
    ends = list(stops)
    for number in reversed(range(len(segments))):
        parent = segments[number].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
    return ends


def _attention_calls(
    ranges: Sequence[slice], subtree_ends: Sequence[int], max_block_tokens: int
) -> tuple[tuple[CausalBlocks, ...], tuple[tuple[slice, slice], ...]]:
    """Return `causal_blocks` and `unmasked_pairs` of a layout.

    Args:
        ranges: token range of each segment.
        subtree_ends: first token after the subtree of each segment.
        max_block_tokens: number of tokens above which a segment is cut into blocks.
    """
    blocks: list[slice] = []
    unmasked_pairs: list[tuple[slice, slice]] = []
    for token_range, subtree_end in zip(ranges, subtree_ends, strict=True):
        segment_blocks = _cut_range(token_range, max_block_tokens)
        blocks += segment_blocks
        unmasked_pairs += _pair_halves(segment_blocks)
        if subtree_end > token_range.stop:  # every token of the descendants attends to this segment
            descendants = slice(token_range.stop, subtree_end)
            unmasked_pairs.append((descendants, token_range))
    return tuple(_group_blocks(blocks)), tuple(unmasked_pairs)


def _cut_range(token_range: slice, max_block_tokens: int) -> list[slice]:
    """Cut a range into as few blocks as possible.

    All blocks but the last have the same length, a multiple of `_CPU_MULTIPLE`. The last one may be
    much shorter.

    Args:
        token_range: range to cut.
        max_block_tokens: largest length of a block. If the range is longer, this must be a multiple
            of `_CPU_MULTIPLE`, because lengths are rounded up to one.
    """
    tokens = token_range.stop - token_range.start
    if tokens <= max_block_tokens:
        return [token_range]
    blocks = -(-tokens // max_block_tokens)
    length = -(-tokens // blocks)
    length += -length % _CPU_MULTIPLE  # round up
    return [
        slice(start, min(start + length, token_range.stop))
        for start in range(token_range.start, token_range.stop, length)
    ]


def _pair_halves(blocks: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Yield queries and keys so that each block attends to all earlier blocks of its segment.

    The second half attends to the first; then the same is done within each half.
    """
    if len(blocks) > 1:
        middle = (len(blocks) + 1) // 2
        queries = slice(blocks[middle].start, blocks[-1].stop)
        keys = slice(blocks[0].start, blocks[middle - 1].stop)
        yield queries, keys
        yield from _pair_halves(blocks[:middle])
        yield from _pair_halves(blocks[middle:])


def _group_blocks(blocks: Sequence[slice]) -> Iterator[CausalBlocks]:
    """Group blocks, which lie end to end, into calls of the attention kernel.

    A run of neighbours of equal length with at least _MIN_CALL_TOKENS tokens in all is one call. The
    blocks of other runs are padded, together with blocks of about their length.
    """
    short_blocks: dict[int, list[slice]] = defaultdict(list)
    for length, run in groupby(blocks, key=lambda block: block.stop - block.start):
        neighbours = list(run)
        token_range = slice(neighbours[0].start, neighbours[-1].stop)
        if token_range.stop - token_range.start >= _MIN_CALL_TOKENS:
            yield CausalBlocks(length, token_range=token_range)
        else:
            short_blocks[length.bit_length()] += neighbours
    for similar_blocks in short_blocks.values():
        yield _pad_blocks(similar_blocks)


def _pad_blocks(blocks: Sequence[slice]) -> CausalBlocks:
    """Pad blocks to the longest one; a single block needs no padding."""
    if len(blocks) == 1:
        return CausalBlocks(blocks[0].stop - blocks[0].start, token_range=blocks[0])
    starts = torch.tensor([block.start for block in blocks])
    lengths = torch.tensor([block.stop - block.start for block in blocks])
    column = torch.arange(int(lengths.max()))
    block_tokens = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
    is_present = column < lengths[:, None]
    present_positions = is_present.flatten().nonzero()[:, 0]
    return CausalBlocks(
        len(column),
        block_tokens=block_tokens,
        is_present=is_present,
        present_positions=present_positions,
        present_tokens=block_tokens.flatten()[present_positions],
    )
