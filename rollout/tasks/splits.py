"""Data splits (train, validation, test): drawing what each one owns, and what leaks from one into another."""

import hashlib
import itertools
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

from rollout.environments.code import SOLUTION, unpack_test
from rollout.records.trajectory import Task
from rollout.sandbox.judge import StdinTest, Test

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def split_of(key: str) -> str:
    """The split that owns a key, whatever the seed: 80 % train, 10 % validation, 10 % test."""
    bucket = hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 10
    return ("validation", "test")[bucket] if bucket < 2 else "train"


_T = TypeVar("_T")
_PATIENCE = 20_000  # draws in a row without anything new, before there is hardly more


def draw_different(
    source: str,
    split: str,
    size: int,
    draw: Callable[[], _T | None],
    key: Callable[[_T], Hashable] = lambda it: it,
) -> list[_T]:
    """`size` things that differ in their keys; a draw gives one, or None for something of another split.

    Raises:
        ValueError: there are hardly so many.
    """
    found: dict[Hashable, _T] = {}
    misses = 0
    while len(found) < size:
        drawn = draw()
        before = len(found)
        if drawn is not None:
            found.setdefault(key(drawn), drawn)
        misses = misses + 1 if len(found) == before else 0
        if misses > _PATIENCE:
            raise ValueError(
                f"{source}: {size} {split} tasks asked for, but {_PATIENCE} draws after the {before}th found no other, "
                f"so there are hardly more; lower data.{split} or ask for larger ones"
            )
    return list(found.values())


def draw_listed(
    source: str, split: str, size: int, owned: Sequence[_T], random: Random
) -> list[_T]:
    """`size` of what a split owns, without replacement; ValueError if it owns fewer."""
    if size > len(owned):
        raise ValueError(
            f"{source}: {size} {split} tasks asked for, but there are {len(owned)}; lower data.{split}"
        )
    return random.sample(owned, size)


def digest(*texts: str) -> str:
    """A short hash of a task's content, which its id ends with."""
    return hashlib.blake2b("".join(texts).encode(), digest_size=8).hexdigest()


LeakKind = Literal["id", "text", "similar", "tests"]

_LATEX = re.compile(r"\\[()\[\],;:! ]|\\(?:left|right)(?![a-zA-Z])|\$|\{\}")
_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:[.,]\d+)*|[^\w\s]|_")
_PROSE = (
    "math",
    "search",
    "code",
)  # environments whose prompts are sentences: in games every sign is part of a board


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A task, and what it was met as before."""

    task: Task
    earlier: Task
    similarity: float = 1.0  # Jaccard index of the two prompts' shingles; 1 for the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """The tasks of `split` that are known from `earlier`, in one sense of known."""

    kind: LeakKind
    earlier: str  # name of a split; of kind `tests`, the same one
    split: str
    tasks: int  # in `split`
    matches: tuple[Match, ...]

    @property
    def exact(self) -> bool:
        """Whether a task leaks beyond doubt."""
        return self.kind != "similar" and bool(self.matches)


def find_leaks(
    splits: Mapping[str, Sequence[Task]], *, words: int = 8, threshold: float | None = 0.5
) -> list[Leak]:
    """Every pair of splits compared by id, by text and by likeness, and every split's programs by their tests.

    Two texts are the same when their tokens are: case and spacing do not count, nor do a final full stop or question
    mark of prose and, in math, LaTeX's delimiters and spacing. Two texts are alike when they are not the same and the
    Jaccard index of their shingles, runs of `words` tokens, is at least `threshold`. Shingles that more than a
    twentieth of a split's texts share, and more than ten of them, are the wording of all its tasks and do not count.
    Without a threshold likeness is not looked for.

    Raises:
        ValueError: a programming task has an answer that is no test.
    """
    tokens = {name: [tokenise(task) for task in tasks] for name, tasks in splits.items()}
    leaks = []
    for earlier, split in itertools.combinations(splits, 2):
        before, after = splits[earlier], splits[split]
        same_text = _same(
            [" ".join(t) for t in tokens[earlier]], [" ".join(t) for t in tokens[split]]
        )
        found: dict[LeakKind, dict[int, tuple[int, float]]] = {
            "id": _same([task.id for task in before], [task.id for task in after]),
            "text": same_text,
        }
        if threshold is not None:
            found["similar"] = _alike(
                tokens[earlier], tokens[split], words, threshold, skip=set(same_text)
            )
        for kind, pairs in found.items():
            matches = tuple(
                Match(task=after[i], earlier=before[j], similarity=value)
                for i, (j, value) in sorted(pairs.items())
            )
            leaks.append(
                Leak(kind=kind, earlier=earlier, split=split, tasks=len(after), matches=matches)
            )
    for name, tasks in splits.items():
        programs = [task for task in tasks if task.env == "code"]
        if programs:
            shown = tuple(
                Match(task=task, earlier=task) for task in programs if shows_its_score(task)
            )
            leaks.append(
                Leak(kind="tests", earlier=name, split=name, tasks=len(programs), matches=shown)
            )
    return leaks


def tokenise(task: Task) -> list[str]:
    """The prompt's words, numbers and signs, without what does not change its meaning."""
    text = unicodedata.normalize("NFKC", task.prompt).casefold()
    if task.env == "math":
        text = _LATEX.sub(" ", text)
    tokens = _TOKEN.findall(text)
    while task.env in _PROSE and tokens and tokens[-1] in ".?":
        tokens.pop()
    return tokens


def shows_its_score(task: Task) -> bool:
    """Whether a program is scored on a test that it is also shown: one is in both sets, or there are no hidden ones."""
    shown: set[str] = set()
    hidden: set[str] = set()
    for text in (text for text in task.answers if not text.startswith(SOLUTION)):
        test, visible = unpack_test(text)
        (shown if visible else hidden).add(_input(test))
    return bool(shown & hidden) or not hidden


def _input(test: Test) -> str:
    return (
        test.stdin.strip()
        if isinstance(test, StdinTest)
        else json.dumps([test.function, test.arguments])
    )


def _same(before: Sequence[str], after: Sequence[str]) -> dict[int, tuple[int, float]]:
    """Of `after`, by position: the first position in `before` with the same key."""
    first = {key: position for position, key in reversed(list(enumerate(before)))}
    return {position: (first[key], 1.0) for position, key in enumerate(after) if key in first}


def _alike(
    before: Sequence[Sequence[str]],
    after: Sequence[Sequence[str]],
    words: int,
    threshold: float,
    *,
    skip: set[int],
) -> dict[int, tuple[int, float]]:
    """Of `after`, by position and but for `skip`: the most similar position in `before`, if similar enough."""
    rows = [shingles(tokens, words) for tokens in after]
    often = Counter(itertools.chain.from_iterable(rows))
    wording = {shingle for shingle, count in often.items() if count > max(10, len(rows) / 20)}
    rows = [row - wording for row in rows]
    holders: dict[int, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        if position not in skip:
            for shingle in row:
                holders[shingle].append(position)
    best: dict[int, tuple[int, float]] = {}
    for earlier, tokens in enumerate(before):
        row = shingles(tokens, words) - wording
        met = Counter(itertools.chain.from_iterable(holders.get(shingle, ()) for shingle in row))
        for position, shared in met.items():
            similarity = shared / (len(row) + len(rows[position]) - shared)
            if similarity >= threshold and similarity > best.get(position, (0, 0.0))[1]:
                best[position] = (earlier, similarity)
    return best


def shingles(tokens: Sequence[str], words: int) -> set[int]:
    """Hashes of all runs of `words` tokens; of the whole text if it is shorter, none if it is empty."""
    starts = range(max(1, len(tokens) - words + 1)) if tokens else ()
    return {hash(tuple(tokens[start : start + words])) for start in starts}
