"""Sequences become a forest: what they begin with in common is one segment."""

import torch

from mcore_mas.megatron.batch import Segment, attention_pairs, depths
from mcore_mas.packing.prefix_tree import (
    MIN_SAVED_TOKENS,
    PrefixForest,
    prefix_forest,
    unshared_forest,
)

STEM = tuple(range(100, 110))  # long enough to be worth sharing
LIMB = tuple(range(200, 210))


def forest_of(*sequences: tuple[int, ...]) -> tuple[PrefixForest, list[int]]:
    return prefix_forest([torch.tensor(ids) for ids in sequences])


def test_three_levels_deep_with_ragged_ends() -> None:
    forest, holders = forest_of((*STEM, 9), (*STEM, *LIMB, 5, 6), (*STEM, *LIMB, 7), (1, 2))
    assert [ids.tolist() for ids in forest.sequences] == [
        [1, 2],
        [*STEM, 9],
        [*STEM, *LIMB, 5, 6],
        [*STEM, *LIMB, 7],
    ]
    assert holders == [1, 2, 3, 0]
    assert forest.shared == [0, 0, 10, 20]
    segments, places = forest.segments()
    assert segments == [
        Segment(tokens=2),
        Segment(tokens=10),
        Segment(tokens=1, parent=1),
        Segment(tokens=10, parent=1),
        Segment(tokens=2, parent=3),
        Segment(tokens=1, parent=3),
    ]
    assert [place.tolist() for place in places] == [
        [0, 1],
        [*range(2, 12), 12],
        [*range(2, 12), *range(13, 23), 23, 24],
        [*range(2, 12), *range(13, 23), 25],
    ]
    assert depths(segments) == [0, 0, 10, 10, 20, 20]
    assert forest.tokens == 26 == sum(segment.tokens for segment in segments)
    # a sequence of n sees n (n + 1) / 2; of the second and the third what they share is seen once
    assert attention_pairs(segments) == 3 + 66 + (253 - 55) + (231 - 210)


def test_equal_sequences_and_beginnings_are_held_by_the_longest() -> None:
    forest, holders = forest_of((1, 2), (1, 2, 3), (1, 2), (4,), (1, 2, 3))
    assert [ids.tolist() for ids in forest.sequences] == [[1, 2, 3], [4]]
    assert holders == [0, 0, 0, 1, 0]
    assert forest.segments()[0] == [Segment(tokens=3), Segment(tokens=1)]


def test_what_saves_too_little_is_stored_with_each() -> None:
    little = STEM[: MIN_SAVED_TOKENS - 1]
    assert forest_of((*little, 1), (*little, 2))[0].shared == [0, 0]
    assert forest_of((*little, 1), (*little, 2), (*little, 3))[0].shared == [
        0,
        MIN_SAVED_TOKENS - 1,
        MIN_SAVED_TOKENS - 1,
    ]
    # two of the three have one more token in common: it is stored twice, behind the stem that all share
    forest, _ = forest_of((*STEM, 7, 1), (*STEM, 7, 2), (*STEM, 8))
    assert forest.segments()[0] == [
        Segment(tokens=10),
        Segment(tokens=2, parent=0),
        Segment(tokens=2, parent=0),
        Segment(tokens=1, parent=0),
    ]
    # short by itself, but worth it together with the short one above it, which is not
    half = MIN_SAVED_TOKENS // 2
    a, b = (1,) * half, (2,) * half
    assert forest_of((*a, *b, 5), (*a, *b, 6), (*a, 3))[0].shared == [0, 2 * half, 0]


def test_what_takes_more_than_it_saves_is_stored_with_each() -> None:
    ends = [(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)]
    sequences = [
        torch.tensor((*STEM, *end)) for end in ends
    ]  # share 10, which saves 20; 12 tokens attend to them
    assert prefix_forest(sequences, 20 / 12 - 0.01)[0].shared == [0, 10, 10]
    assert prefix_forest(sequences, 20 / 12 + 0.01)[0].shared == [0, 0, 0]
    # the stem of all saves 10, for 50 tokens behind it; the next 15 of two and two with the stem 25, for 10 behind them
    far = [(7,) * 15 + (n,) * 5 for n in (1, 2)] + [(8,) * 15 + (n,) * 5 for n in (1, 2)]
    sequences = [torch.tensor((*STEM, *rest)) for rest in far]
    assert prefix_forest(sequences, 0.19)[0].shared == [0, 25, 10, 25]
    assert prefix_forest(sequences, 0.21)[0].shared == [0, 25, 0, 25]


def test_a_stretch_is_a_forest_with_its_own_stem() -> None:
    forest, _ = forest_of((*STEM, 1), (*STEM, 2), (*STEM, 3))
    part = forest[1:3]
    assert (len(part), part.shared, part.tokens) == (2, [0, 10], 12)
    assert part.segments()[0] == [
        Segment(tokens=10),
        Segment(tokens=1, parent=0),
        Segment(tokens=1, parent=0),
    ]


def test_apart_nothing_is_shared() -> None:
    forest, holders = unshared_forest([torch.tensor(ids) for ids in ((1, 2), (1, 2), (1, 2, 3))])
    assert (forest.tokens, holders) == (7, [0, 1, 2])
    assert forest.segments()[0] == [Segment(tokens=2), Segment(tokens=2), Segment(tokens=3)]
