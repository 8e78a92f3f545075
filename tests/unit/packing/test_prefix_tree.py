"""Forests of sequences, in which common prefixes are one segment."""

import torch

from mcore_mas.megatron.batch import Segment, attention_pairs, depths
from mcore_mas.packing.prefix_tree import (
    MIN_SAVED_TOKENS,
    PrefixForest,
    prefix_forest,
    unshared_forest,
)

# Prefixes that are long enough to be shared
STEM = tuple(range(100, 110))
LIMB = tuple(range(200, 210))


def forest_of(*sequences: tuple[int, ...]) -> tuple[PrefixForest, list[int]]:
    return prefix_forest([torch.tensor(ids) for ids in sequences])


def test_prefixes_of_three_levels_and_ends_of_different_lengths() -> None:
    forest, leaf_of = forest_of((*STEM, 9), (*STEM, *LIMB, 5, 6), (*STEM, *LIMB, 7), (1, 2))
    assert [ids.tolist() for ids in forest.sequences] == [
        [1, 2],
        [*STEM, 9],
        [*STEM, *LIMB, 5, 6],
        [*STEM, *LIMB, 7],
    ]
    assert leaf_of == [1, 2, 3, 0]
    assert forest.shared == [0, 0, 10, 20]
    segments, positions = forest.segments()
    assert segments == [
        Segment(tokens=2),
        Segment(tokens=10),
        Segment(tokens=1, parent=1),
        Segment(tokens=10, parent=1),
        Segment(tokens=2, parent=3),
        Segment(tokens=1, parent=3),
    ]
    assert [indices.tolist() for indices in positions] == [
        [0, 1],
        [*range(2, 12), 12],
        [*range(2, 12), *range(13, 23), 23, 24],
        [*range(2, 12), *range(13, 23), 25],
    ]
    assert depths(segments) == [0, 0, 10, 10, 20, 20]
    assert forest.tokens == 26
    assert sum(segment.tokens for segment in segments) == 26
    # A sequence of n tokens has n (n + 1) / 2 pairs. Pairs within a shared prefix count once.
    assert attention_pairs(segments) == 3 + 66 + (253 - 55) + (231 - 210)


def test_equal_sequences_and_prefixes_are_stored_in_the_longest() -> None:
    forest, leaf_of = forest_of((1, 2), (1, 2, 3), (1, 2), (4,), (1, 2, 3))
    assert [ids.tolist() for ids in forest.sequences] == [[1, 2, 3], [4]]
    assert leaf_of == [0, 0, 0, 1, 0]
    assert forest.segments()[0] == [Segment(tokens=3), Segment(tokens=1)]


def test_a_prefix_that_saves_too_few_tokens_is_not_shared() -> None:
    too_short = MIN_SAVED_TOKENS - 1
    prefix = STEM[:too_short]
    assert forest_of((*prefix, 1), (*prefix, 2))[0].shared == [0, 0]
    # Three sequences save the prefix twice.
    forest, _ = forest_of((*prefix, 1), (*prefix, 2), (*prefix, 3))
    assert forest.shared == [0, too_short, too_short]

    # Two of three sequences have one more common token, which is stored twice after the shared stem.
    forest, _ = forest_of((*STEM, 7, 1), (*STEM, 7, 2), (*STEM, 8))
    assert forest.segments()[0] == [
        Segment(tokens=10),
        Segment(tokens=2, parent=0),
        Segment(tokens=2, parent=0),
        Segment(tokens=1, parent=0),
    ]

    # Two short prefixes, of which each is too short, are long enough together.
    half = MIN_SAVED_TOKENS // 2
    first = (1,) * half
    second = (2,) * half
    forest, _ = forest_of((*first, *second, 5), (*first, *second, 6), (*first, 3))
    assert forest.shared == [0, 2 * half, 0]


def test_a_prefix_that_costs_more_than_it_saves_is_not_shared() -> None:
    # The stem of 10 tokens saves 20, and 12 later tokens attend to it.
    ends = [(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)]
    sequences = [torch.tensor((*STEM, *end)) for end in ends]
    assert prefix_forest(sequences, 20 / 12 - 0.01)[0].shared == [0, 10, 10]
    assert prefix_forest(sequences, 20 / 12 + 0.01)[0].shared == [0, 0, 0]

    # The stem of all four sequences saves 10 tokens, with 50 after it. The stem and the next 15 tokens of
    # each pair save 25, with 10 after them.
    ends = []
    for limb in (7, 8):
        ends += [(limb,) * 15 + (end,) * 5 for end in (1, 2)]
    sequences = [torch.tensor((*STEM, *end)) for end in ends]
    assert prefix_forest(sequences, 0.19)[0].shared == [0, 25, 10, 25]
    assert prefix_forest(sequences, 0.21)[0].shared == [0, 25, 0, 25]


def test_a_slice_of_a_forest_stores_its_prefix() -> None:
    forest, _ = forest_of((*STEM, 1), (*STEM, 2), (*STEM, 3))
    part = forest[1:3]
    assert len(part) == 2
    assert part.shared == [0, 10]
    assert part.tokens == 12
    assert part.segments()[0] == [
        Segment(tokens=10),
        Segment(tokens=1, parent=0),
        Segment(tokens=1, parent=0),
    ]


def test_an_unshared_forest_shares_no_prefix() -> None:
    forest, leaf_of = unshared_forest([torch.tensor(ids) for ids in ((1, 2), (1, 2), (1, 2, 3))])
    assert forest.tokens == 7
    assert leaf_of == [0, 1, 2]
    assert forest.segments()[0] == [Segment(tokens=2), Segment(tokens=2), Segment(tokens=3)]
