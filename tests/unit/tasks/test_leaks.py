"""Leaks between splits, by hand, and known leaks of published systems."""

from __future__ import annotations

import random
import string
import time

import pytest

from rollout.environments.code import pack_solution, pack_test
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, StdinTest
from rollout.tasks.leaks import (
    Leak,
    LeakKind,
    find_leaks,
    is_scored_by_visible_test,
    shingles,
    tokenize,
)


def make_task(id: str, prompt: str, env: str = "math", answers: tuple[str, ...] = ("1",)) -> Task:
    return Task(id=id, prompt=prompt, answers=answers, env=env, source=env, split="train")


def leak_of(leaks: list[Leak], kind: LeakKind) -> Leak:
    [leak] = [leak for leak in leaks if leak.kind == kind]
    return leak


def ids(leak: Leak) -> list[tuple[str, str]]:
    """Return the ids of each match: of the earlier task, and of the task."""
    return [(match.earlier.id, match.task.id) for match in leak.matches]


class TestPublishedSystems:
    def test_sudoku_puzzles_that_return_every_400_seeds(self) -> None:
        """The puzzle is that of seed % 400; train seeds begin at 0, and test seeds at 100000."""
        puzzles = [
            f"Solve:\n{i // 4 % 4 + 1} . . {i % 4 + 1}\n. {i // 16 % 5} . .\n{i // 80} . 1 ."
            for i in range(400)
        ]
        assert len(set(puzzles)) == 400
        train = [make_task(f"sudoku/{seed}", puzzles[seed], "sudoku") for seed in range(400)]
        test = [
            make_task(f"sudoku/{seed}", puzzles[seed % 400], "sudoku")
            for seed in range(100_000, 100_100)
        ]
        leaks = find_leaks({"train": train, "test": test})
        assert not leak_of(leaks, "id").matches
        leak = leak_of(leaks, "text")
        assert leak.is_certain
        assert leak.tasks == len(leak.matches) == 100
        assert ids(leak)[:2] == [("sudoku/0", "sudoku/100000"), ("sudoku/1", "sudoku/100001")]

    def test_aime_of_all_years_contains_aime_2024(self) -> None:
        """Ids, LaTeX delimiters and spacing differ; the problems are the same."""
        all_years = [
            make_task("aime/1983-1", "Let $x$, $y$ and $z$ all exceed $1$. Find $\\log_z w$."),
            make_task(
                "aime/2024-I-1",
                "Every morning Aya goes for a $9$-kilometer walk. Find $t$, with $s+\\frac{1}{2}$.",
            ),
            make_task("aime/2024-I-2", "There exist real numbers $x$ and $y$. Find $xy$."),
        ]
        test = [
            make_task(
                "aime_2024/60",
                "Every morning Aya goes for a \\(9\\)-kilometer walk.  Find \\(t\\), with "
                "$s + \\frac{1}{2}$",
            ),
            make_task("aime_2024/61", "There exist real numbers $x$ and $y$. Find $x/y$."),
            make_task("aime_2024/62", "Jen enters a lottery."),
        ]
        leaks = find_leaks({"train": all_years, "test": test})
        assert ids(leak_of(leaks, "text")) == [("aime/2024-I-1", "aime_2024/60")]
        assert not leak_of(leaks, "id").matches


def test_every_pair_of_splits_is_compared_by_id_and_text() -> None:
    splits = {
        "train": [make_task("1", "one"), make_task("2", "two")],
        "validation": [make_task("3", "Two."), make_task("1", "three")],
        "test": [make_task("4", "THREE"), make_task("5", "five")],
    }
    leaks = find_leaks(splits)
    assert len(leaks) == 9
    matches = {(leak.earlier, leak.split, leak.kind): ids(leak) for leak in leaks if leak.matches}
    assert matches == {
        ("train", "validation", "id"): [("1", "1")],
        ("train", "validation", "text"): [("2", "3")],
        ("validation", "test", "text"): [("1", "4")],
    }


def stdin_tests(*inputs: tuple[str, bool]) -> tuple[str, ...]:
    """Return tests as answers, from their inputs and whether they are visible."""
    return tuple(
        pack_test(StdinTest(stdin=stdin, expected="7"), visible=visible)
        for stdin, visible in inputs
    )


def call_test(arguments: tuple[object, ...], visible: bool) -> str:
    test = CallTest(function="f", arguments=arguments, accepted=(1,))
    return pack_test(test, visible=visible)


class TestPrograms:
    def test_programs_that_are_scored_by_tests_which_they_are_shown(self) -> None:
        hidden_only = make_task("a", "A", "code", stdin_tests(("1", False)))
        separate_tests = stdin_tests(("1", True), ("2", False))
        separate = make_task("b", "B", "code", (*separate_tests, pack_solution("print(7)")))
        shared = make_task("c", "C", "code", stdin_tests(("1", True), ("2", False), ("1\n", False)))
        visible_only = make_task("d", "D", "code", stdin_tests(("1", True)))
        tasks = [hidden_only, separate, shared, visible_only, make_task("m", "M")]
        leak = leak_of(find_leaks({"test": tasks}), "tests")
        assert leak.is_certain
        assert leak.tasks == 4
        assert [match.task.id for match in leak.matches] == ["c", "d"]

    def test_calls_are_compared_by_function_and_arguments(self) -> None:
        same = (call_test(([1, 2],), True), call_test(([1, 2],), False))
        different = (call_test(([1, 2],), True), call_test(([2, 1],), False))
        assert is_scored_by_visible_test(make_task("a", "A", "code", same))
        assert not is_scored_by_visible_test(make_task("a", "A", "code", different))


def make_words(start: int, count: int = 20) -> str:
    """Return different words, from the word with number `start`."""
    letters = string.ascii_lowercase
    return " ".join(f"w{letters[i // 26]}{letters[i % 26]}" for i in range(start, start + count))


class TestSimilarity:
    def test_it_is_the_jaccard_index_of_shingles(self) -> None:
        """20 words have 18 sequences of 3; a text that starts k later shares 18-k of 18+k."""
        train = [make_task("t", make_words(0))]
        test = [make_task(f"k{k}", make_words(k)) for k in (0, 2, 6, 7)]
        leaks = find_leaks({"train": train, "test": test}, words=3, threshold=0.5)
        leak = leak_of(leaks, "similar")
        similarities = [(match.task.id, match.similarity) for match in leak.matches]
        assert similarities == [("k2", 16 / 20), ("k6", 12 / 24)]
        assert not leak.is_certain
        assert ids(leak_of(leaks, "text")) == [("t", "k0")]

    def test_the_most_similar_task_is_the_match(self) -> None:
        train = [
            make_task("far", make_words(4)),
            make_task("near", make_words(1)),
            make_task("next", make_words(2)),
        ]
        test = [make_task("x", make_words(0))]
        leaks = find_leaks({"train": train, "test": test}, words=3, threshold=0.1)
        assert ids(leak_of(leaks, "similar")) == [("near", "x")]

    def test_the_wording_of_all_tasks_does_not_make_them_similar(self) -> None:
        """12 tasks share 20 words and end in words of their own.

        Of the 22 sequences of 3 words, the 18 shared ones do not count. A pair of equal tasks has 3
        of 5 others in common.
        """
        wording = make_words(0)
        train = [make_task(f"t{i}", f"{wording} {make_words(100 + 30 * i, 4)}") for i in range(12)]
        test = [
            make_task(f"x{i}", f"{wording} {make_words(100 + 30 * i, 3)} other")
            for i in range(6, 18)
        ]
        leaks = find_leaks({"train": train, "test": test}, words=3, threshold=0.5)
        leak = leak_of(leaks, "similar")
        assert ids(leak) == [(f"t{i}", f"x{i}") for i in range(6, 12)]
        assert [match.similarity for match in leak.matches] == [3 / 5] * 6

    @pytest.mark.slow
    def test_twenty_thousand_by_one_thousand_tasks_take_seconds(self) -> None:
        generator = random.Random(0)
        letters = string.ascii_lowercase
        vocabulary = [f"w{first}{second}" for first in letters for second in letters]
        train = [
            make_task(str(i), " ".join(generator.choices(vocabulary, k=80))) for i in range(20_000)
        ]
        test = [make_task(f"x{i}", f"{train[i].prompt} again") for i in range(1000)]
        start = time.process_time()
        leaks = find_leaks({"train": train, "test": test})
        assert time.process_time() - start < 60
        # 80 words have 73 sequences of 8, and 81 words 74
        leak = leak_of(leaks, "similar")
        assert ids(leak) == [(str(i), f"x{i}") for i in range(1000)]
        assert {match.similarity for match in leak.matches} == {73 / 74}


@pytest.mark.parametrize(
    ("prompt", "env", "tokens"),
    [
        ("Who wrote  Ｈamlet?", "search", ["who", "wrote", "hamlet"]),
        ("$x+1,000.5$ \\left( a \\right).", "math", ["x", "+", "1,000.5", "(", "a", ")"]),
        ("#$_\n#.@", "sokoban", ["#", "$", "_", "#", ".", "@"]),
        ("1 . ?\n2 .", "sudoku", ["1", ".", "?", "2", "."]),
        ("What is 5!?", "math", ["what", "is", "5", "!"]),
        ("", "math", []),
    ],
)
def test_tokens_of_prompts(prompt: str, env: str, tokens: list[str]) -> None:
    assert tokenize(make_task("a", prompt, env)) == tokens


def test_shingles_of_short_texts() -> None:
    assert shingles(list("abcd"), 3) == {hash(("a", "b", "c")), hash(("b", "c", "d"))}
    assert shingles(list("ab"), 3) == {hash(("a", "b"))}
    assert shingles([], 3) == set()


def test_deals_of_zero_sum_games_are_not_compared() -> None:
    deals = [make_task("a", "K Q", "kuhn_poker"), make_task("b", "What is 1+1?", "math")]
    leaks = find_leaks({"train": deals, "test": deals})
    assert {(leak.kind, leak.tasks, len(leak.matches)) for leak in leaks} == {
        ("id", 1, 1),
        ("text", 1, 1),
        ("similar", 1, 0),
    }
