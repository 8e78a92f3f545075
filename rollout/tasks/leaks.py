"""Leaks between data splits: tasks that a split has in common with an earlier one."""

import itertools
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.environments.code import SOLUTION, unpack_test
from rollout.environments.games import ZERO_SUM_GAMES
from rollout.records.trajectory import Task
from rollout.sandbox.judge import StdinTest, Test

# "id": equal ids. "text": equal prompts. "similar": many common word sequences. "tests": a program
# is scored by a test that agents are shown.
LeakKind = Literal["id", "text", "similar", "tests"]

_LATEX_SPACING = re.compile(r"\\[()\[\],;:! ]|\\(?:left|right)(?![a-zA-Z])|\$|\{\}")
_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:[.,]\d+)*|[^\w\s]|_")

# Environments whose prompts are sentences. In games every sign is part of a board.
_PROSE_ENVS = frozenset({"math", "search", "code"})

# A shingle is common if it is in more than ten texts of the later split, and in more than a twentieth
# of its texts. Common shingles belong to the wording of all tasks, such as "find the value of".
_COMMON_MIN_TEXTS = 10
_COMMON_DIVISOR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Task that an earlier split has too.

    Attributes:
        task: the task.
        earlier: the task in the earlier split.
        similarity: Jaccard index of the shingles of both prompts; 1 for equal texts.
    """

    task: Task
    earlier: Task
    similarity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Result of comparing two splits in one way; it may contain no leak.

    Attributes:
        kind: kind of comparison.
        earlier: name of the earlier split; for kind "tests", equal to `split`.
        split: name of the later split, whose tasks are counted.
        tasks: number of tasks in the split.
        matches: tasks that leak.
    """

    kind: LeakKind
    earlier: str
    split: str
    tasks: int
    matches: tuple[Match, ...]

    @property
    def is_certain(self) -> bool:
        """True if at least one task leaks for certain, not just by similarity."""
        return self.kind != "similar" and bool(self.matches)


@dataclass(frozen=True, slots=True)
class _IndexMatch:
    """Index of a matching task in the earlier split, and the similarity."""

    earlier: int
    similarity: float


# By index of the task in the later split.
_Matches = dict[int, _IndexMatch]


def find_leaks(
    splits: Mapping[str, Sequence[Task]], *, words: int = 8, threshold: float | None = 0.5
) -> list[Leak]:
    """Compare every pair of splits by id, text and similarity, and all programs by their tests.

    Two texts are equal if their tokens are: case and spacing do not count, nor do the final full
    stop or question mark of prose and, in math, the delimiters and the spacing of LaTeX.

    Two other texts are similar if the Jaccard index of their shingles is at least the threshold. A
    shingle is a sequence of `words` tokens. Shingles in more than a twentieth of the later split's
    texts, and in more than ten of them, do not count.

    Deals of zero-sum games are left out: a game is learned against an opponent and not from examples,
    so every split is drawn from all of its deals.

    Args:
        splits: tasks by name of the split, in order.
        words: number of tokens in a shingle.
        threshold: threshold of the similarity; None does not compare by similarity.

    Raises:
        ValueError: an answer of a programming task is not a test.
    """
    splits = {
        name: [task for task in tasks if task.env not in ZERO_SUM_GAMES]
        for name, tasks in splits.items()
    }
    tokens = {name: [tokenize(task) for task in tasks] for name, tasks in splits.items()}
    leaks = []
    for earlier, split in itertools.combinations(splits, 2):
        same_text = _equal_keys(_texts(tokens[earlier]), _texts(tokens[split]))
        matches: dict[LeakKind, _Matches] = {
            "id": _equal_keys(
                [task.id for task in splits[earlier]], [task.id for task in splits[split]]
            ),
            "text": same_text,
        }
        if threshold is not None:
            matches["similar"] = _similar_texts(
                tokens[earlier],
                tokens[split],
                words=words,
                threshold=threshold,
                skip=set(same_text),
            )
        for kind, kind_matches in matches.items():
            leaks.append(
                Leak(
                    kind=kind,
                    earlier=earlier,
                    split=split,
                    tasks=len(splits[split]),
                    matches=_task_matches(splits[earlier], splits[split], kind_matches),
                )
            )
    return leaks + _leaks_of_tests(splits)


def _leaks_of_tests(splits: Mapping[str, Sequence[Task]]) -> list[Leak]:
    """Return the programming tasks of each split that are scored by a visible test."""
    leaks = []
    for split, tasks in splits.items():
        programs = [task for task in tasks if task.env == "code"]
        if programs:
            scored_by_visible = [task for task in programs if is_scored_by_visible_test(task)]
            leaks.append(
                Leak(
                    kind="tests",
                    earlier=split,
                    split=split,
                    tasks=len(programs),
                    matches=tuple(Match(task=task, earlier=task) for task in scored_by_visible),
                )
            )
    return leaks


def _texts(token_lists: Sequence[Sequence[str]]) -> list[str]:
    return [" ".join(tokens) for tokens in token_lists]


def _task_matches(
    earlier: Sequence[Task], tasks: Sequence[Task], matches: _Matches
) -> tuple[Match, ...]:
    """Return the matching tasks, in the order of the later split."""
    return tuple(
        Match(task=tasks[index], earlier=earlier[match.earlier], similarity=match.similarity)
        for index, match in sorted(matches.items(), key=lambda item: item[0])
    )


def tokenize(task: Task) -> list[str]:
    """Return the words, numbers and signs of a prompt that change its meaning."""
    text = unicodedata.normalize("NFKC", task.prompt).casefold()
    if task.env == "math":
        text = _LATEX_SPACING.sub(" ", text)
    tokens = _TOKEN.findall(text)
    if task.env in _PROSE_ENVS:
        while tokens and tokens[-1] in ".?":
            tokens.pop()
    return tokens


def is_scored_by_visible_test(task: Task) -> bool:
    """Return True if a programming task is scored by a test that agents are shown.

    Either a test is both visible and hidden, or there are no hidden tests.
    """
    visible_inputs: set[str] = set()
    hidden_inputs: set[str] = set()
    for answer in task.answers:
        if answer.startswith(SOLUTION):
            continue
        test, is_visible = unpack_test(answer)
        inputs = visible_inputs if is_visible else hidden_inputs
        inputs.add(_input_of(test))
    return bool(visible_inputs & hidden_inputs) or not hidden_inputs


def _input_of(test: Test) -> str:
    if isinstance(test, StdinTest):
        return test.stdin.strip()
    return json.dumps([test.function, test.arguments])


def _equal_keys(earlier: Sequence[str], later: Sequence[str]) -> _Matches:
    """Match each key with the first equal key of an earlier split."""
    first_index: dict[str, int] = {}
    for index, key in enumerate(earlier):
        first_index.setdefault(key, index)
    return {
        index: _IndexMatch(first_index[key], 1.0)
        for index, key in enumerate(later)
        if key in first_index
    }


def _similar_texts(
    earlier: Sequence[Sequence[str]],
    later: Sequence[Sequence[str]],
    *,
    words: int,
    threshold: float,
    skip: set[int],
) -> _Matches:
    """Match each text with the most similar text of an earlier split; ignore common shingles.

    Args:
        earlier: tokens of the earlier split's texts.
        later: tokens of the later split's texts.
        words: number of tokens in a shingle.
        threshold: smallest similarity of a match.
        skip: indices of later texts that are not matched.
    """
    later_shingles = [shingles(tokens, words) for tokens in later]
    common = _common_shingles(later_shingles)
    later_shingles = [text_shingles - common for text_shingles in later_shingles]
    texts_with: dict[int, list[int]] = defaultdict(list)  # indices of later texts by shingle
    for index, text_shingles in enumerate(later_shingles):
        if index not in skip:
            for shingle in text_shingles:
                texts_with[shingle].append(index)

    best: _Matches = {}
    for earlier_index, tokens in enumerate(earlier):
        earlier_shingles = shingles(tokens, words) - common
        sharing_texts = (texts_with.get(shingle, ()) for shingle in earlier_shingles)
        shared_counts = Counter(itertools.chain.from_iterable(sharing_texts))
        for index, shared in shared_counts.items():
            # Jaccard index: size of the intersection by size of the union.
            similarity = shared / (len(earlier_shingles) + len(later_shingles[index]) - shared)
            previous = best.get(index)
            if similarity >= threshold and (previous is None or similarity > previous.similarity):
                best[index] = _IndexMatch(earlier_index, similarity)
    return best


def _common_shingles(later_shingles: Sequence[set[int]]) -> set[int]:
    """Return the shingles that are in so many texts that they say nothing about a single one."""
    counts = Counter(itertools.chain.from_iterable(later_shingles))
    max_count = max(_COMMON_MIN_TEXTS, len(later_shingles) / _COMMON_DIVISOR)
    return {shingle for shingle, count in counts.items() if count > max_count}


def shingles(tokens: Sequence[str], words: int) -> set[int]:
    """Return the hashes of all sequences of `words` tokens.

    A shorter text has one shingle, all its tokens; an empty text has none.
    """
    if not tokens:
        return set()
    starts = range(max(1, len(tokens) - words + 1))
    return {hash(tuple(tokens[start : start + words])) for start in starts}
