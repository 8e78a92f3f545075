"""Layout of attention over packed trees: calls of torch's kernels, and block plans of Triton's."""

from collections.abc import Sequence

from mcore_mas.megatron.batch import Segment
from mcore_mas.megatron.model.layout import BlockPlan, PackedTrees, TileSizes


def plan_of(segments: Sequence[Segment], sizes: TileSizes) -> BlockPlan:
    plan = PackedTrees.of(segments, sizes=sizes).block_plan
    assert plan is not None
    return plan


def test_a_long_stem_and_its_replies_are_few_calls() -> None:
    segments = [Segment(tokens=512), *(Segment(tokens=64, parent=0) for _ in range(8))]
    layout = PackedTrees.of(segments)
    # One call has the four blocks of the stem, and another has the replies.
    assert [(blocks.token_range, blocks.length) for blocks in layout.causal_blocks] == [
        (slice(0, 512), 128),
        (slice(512, 1024), 64),
    ]
    # One half of the stem attends to the other, one quarter of each half to the other, and all
    # replies attend to the stem.
    assert layout.unmasked_pairs == (
        (slice(256, 512), slice(0, 256)),
        (slice(128, 256), slice(0, 128)),
        (slice(384, 512), slice(256, 384)),
        (slice(512, 1024), slice(0, 512)),
    )


def test_short_segments_are_padded_together_with_those_of_about_their_length() -> None:
    layout = PackedTrees.of([Segment(tokens=n) for n in (3, 20, 2, 100)])
    by_length = {blocks.length: blocks for blocks in layout.causal_blocks}
    assert sorted(by_length) == [3, 20, 100]
    padded = by_length[3]
    assert padded.block_tokens is not None
    assert padded.block_tokens.tolist() == [[0, 1, 2], [23, 24, 24]]
    assert padded.is_present is not None
    assert padded.is_present.tolist() == [[True, True, True], [True, True, False]]
    assert by_length[20].token_range == slice(3, 23)
    assert by_length[100].token_range == slice(25, 125)


def test_a_block_plan_lists_the_key_blocks_of_each_query_block() -> None:
    segments = [
        Segment(tokens=3),
        Segment(tokens=2, parent=0),
        Segment(tokens=3, parent=0),
        Segment(tokens=2),
    ]
    # A tile of queries has 2 tokens with 2 heads each. Keys come in blocks of 4, and of 2 in the
    # gradients of keys and values.
    plan = plan_of(segments, TileSizes(2, rows=4, keys=4, rows_kv=4, keys_kv=2))
    assert plan.ends.tolist() == [8, 8, 8, 5, 5, 8, 8, 8, 10, 10]
    # Query blocks are tokens 0-1, 2-3, 4-5, 6-7 and 8-9; key blocks are 0-3, 4-7 and 8-9.
    assert plan.key_block_offsets.tolist() == [0, 1, 2, 4, 6, 7]
    assert plan.key_blocks.tolist() == [0, 0, 0, 1, 0, 1, 2]
    # Every pair needs the mask: the blocks are on the diagonal, or a segment ends in them.
    assert plan.first_masked.tolist() == plan.key_block_offsets.tolist()[:-1]
    assert plan.smallest_end_kv.tolist() == [8, 5, 5, 8, 10]
    assert plan.largest_end_kv.tolist() == [8, 8, 8, 8, 10]


def test_key_blocks_that_need_no_mask_come_first() -> None:
    segments = [Segment(tokens=8), Segment(tokens=4, parent=0), Segment(tokens=4, parent=0)]
    plan = plan_of(segments, TileSizes(1, rows=4, keys=4, rows_kv=4, keys_kv=4))
    assert plan.key_block_offsets.tolist() == [0, 1, 3, 6, 9]
    assert plan.key_blocks.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 3]
    # Only the blocks on the diagonal need the mask.
    assert plan.first_masked.tolist() == [0, 2, 5, 8]
