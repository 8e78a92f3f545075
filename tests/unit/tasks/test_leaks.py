"""What counts as a leak between splits, by hand, and the known leaks of published systems made again."""

from __future__ import annotations

import random
import time

import pytest

from rollout.environments.code import pack_solution, pack_test
from rollout.records.trajectory import Task
from rollout.sandbox.judge import CallTest, StdinTest
from rollout.tasks.leaks import Leak, LeakKind, find_leaks, shingles, shows_its_score, tokenise


def task(id: str, prompt: str, env: str = "math", answers: tuple[str, ...] = ("1",)) -> Task:
    return Task(id=id, prompt=prompt, answers=answers, env=env, source=env, split="train")


def leak(leaks: list[Leak], kind: LeakKind) -> Leak:
    (found,) = (one for one in leaks if one.kind == kind)
    return found


def ids(found: Leak) -> list[tuple[str, str]]:
    return [(match.earlier.id, match.task.id) for match in found.matches]


def test_sudoku_puzzles_that_return_every_400_seeds() -> None:
    """Puzzle = seed % 400, train seeds from 0, test seeds from 100000; 100000 % 400 is 0."""
    bank = [
        f"Solve:\n{i // 4 % 4 + 1} . . {i % 4 + 1}\n. {i // 16 % 5} . .\n{i // 80} . 1 ."
        for i in range(400)
    ]
    assert len(set(bank)) == 400
    train = [task(f"sudoku/{seed}", bank[seed % 400], "sudoku") for seed in range(400)]
    test = [task(f"sudoku/{seed}", bank[seed % 400], "sudoku") for seed in range(100_000, 100_100)]
    leaks = find_leaks({"train": train, "test": test})
    assert not leak(leaks, "id").matches
    found = leak(leaks, "text")
    assert found.exact
    assert (len(found.matches), found.tasks) == (100, 100)
    assert ids(found)[:2] == [("sudoku/0", "sudoku/100000"), ("sudoku/1", "sudoku/100001")]


def test_aime_of_all_years_holds_aime_2024() -> None:
    """Other ids, LaTeX delimiters and spacing; the problems are the same."""
    every = [
        task("aime/1983-1", "Let $x$, $y$ and $z$ all exceed $1$. Find $\\log_z w$."),
        task(
            "aime/2024-I-1",
            "Every morning Aya goes for a $9$-kilometer walk. Find $t$, with $s+\\frac{1}{2}$.",
        ),
        task("aime/2024-I-2", "There exist real numbers $x$ and $y$. Find $xy$."),
    ]
    test = [
        task(
            "aime_2024/60",
            "Every morning Aya goes for a \\(9\\)-kilometer walk.  Find \\(t\\), with $s + \\frac{1}{2}$",
        ),
        task("aime_2024/61", "There exist real numbers $x$ and $y$. Find $x/y$."),
        task("aime_2024/62", "Jen enters a lottery."),
    ]
    leaks = find_leaks({"train": every, "test": test})
    assert ids(leak(leaks, "text")) == [("aime/2024-I-1", "aime_2024/60")]
    assert not leak(leaks, "id").matches


def packed(*tests: tuple[str, bool]) -> tuple[str, ...]:
    return tuple(
        pack_test(StdinTest(stdin=given, expected="7"), visible=visible) for given, visible in tests
    )


def test_programs_scored_on_tests_that_they_are_shown() -> None:
    hidden_only = task("a", "A", "code", packed(("1", False)))
    apart = task("b", "B", "code", (*packed(("1", True), ("2", False)), pack_solution("print(7)")))
    among = task("c", "C", "code", packed(("1", True), ("2", False), ("1\n", False)))
    visible_only = task("d", "D", "code", packed(("1", True)))
    leaks = find_leaks({"test": [hidden_only, apart, among, visible_only, task("m", "M")]})
    found = leak(leaks, "tests")
    assert found.exact
    assert [match.task.id for match in found.matches] == ["c", "d"]
    assert found.tasks == 4


def test_calls_are_compared_by_function_and_arguments() -> None:
    def call(arguments: tuple[object, ...], visible: bool) -> str:
        return pack_test(
            CallTest(function="f", arguments=arguments, accepted=(1,)), visible=visible
        )

    assert shows_its_score(task("a", "A", "code", (call(([1, 2],), True), call(([1, 2],), False))))
    assert not shows_its_score(
        task("a", "A", "code", (call(([1, 2],), True), call(([2, 1],), False)))
    )


def test_ids_texts_and_pairs_of_splits() -> None:
    splits = {
        "train": [task("1", "one"), task("2", "two")],
        "validation": [task("3", "Two."), task("1", "three")],
        "test": [task("4", "THREE"), task("5", "five")],
    }
    found = {
        (one.earlier, one.split, one.kind): ids(one) for one in find_leaks(splits) if one.matches
    }
    assert found == {
        ("train", "validation", "id"): [("1", "1")],
        ("train", "validation", "text"): [("2", "3")],
        ("validation", "test", "text"): [("1", "4")],
    }
    assert len(find_leaks(splits)) == 9


def words(start: int, count: int = 20) -> str:
    return " ".join(f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(start, start + count))


def test_similar_is_the_share_of_runs_in_common() -> None:
    """20 words have 18 runs of 3; starting k later leaves 18-k in common of 18+k."""
    train = [task("t", words(0))]
    test = [task(f"k{k}", words(k)) for k in (0, 2, 6, 7)]
    leaks = find_leaks({"train": train, "test": test}, words=3, threshold=0.5)
    similar = leak(leaks, "similar")
    assert [(m.task.id, m.similarity) for m in similar.matches] == [
        ("k2", 16 / 20),
        ("k6", 12 / 24),
    ]
    assert not similar.exact
    assert ids(leak(leaks, "text")) == [("t", "k0")]


def test_the_most_similar_is_shown() -> None:
    train = [task("far", words(4)), task("near", words(1)), task("next", words(2))]
    leaks = find_leaks({"train": train, "test": [task("x", words(0))]}, words=3, threshold=0.1)
    assert ids(leak(leaks, "similar")) == [("near", "x")]


def test_the_wording_of_all_tasks_does_not_make_them_similar() -> None:
    """12 tasks share 20 words and end in one of their own: the shared runs say nothing."""
    train = [task(f"t{i}", f"{words(0)} {words(100 + 30 * i, 4)}") for i in range(12)]
    test = [task(f"x{i}", f"{words(0)} {words(100 + 30 * i, 3)} other") for i in range(6, 18)]
    leaks = find_leaks({"train": train, "test": test}, words=3, threshold=0.5)
    # of the 22 runs of 24 words the 18 shared ones do not count; of 4 and 4 others 3 are common: 3/5
    assert [(m.earlier.id, m.task.id, m.similarity) for m in leak(leaks, "similar").matches] == [
        (f"t{i}", f"x{i}", 3 / 5) for i in range(6, 12)
    ]


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
def test_tokens(prompt: str, env: str, tokens: list[str]) -> None:
    assert tokenise(task("a", prompt, env)) == tokens


def test_shingles_of_short_texts() -> None:
    assert shingles(list("abcd"), 3) == {hash(("a", "b", "c")), hash(("b", "c", "d"))}
    assert shingles(list("ab"), 3) == {hash(("a", "b"))}
    assert shingles([], 3) == set()


@pytest.mark.slow
def test_twenty_thousand_by_one_thousand_in_seconds() -> None:
    pick = random.Random(0)
    vocabulary = [
        f"w{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"
    ]
    train = [task(str(i), " ".join(pick.choices(vocabulary, k=80))) for i in range(20_000)]
    test = [task(f"x{i}", f"{train[i].prompt} again") for i in range(1000)]
    start = time.process_time()
    leaks = find_leaks({"train": train, "test": test})
    assert time.process_time() - start < 60
    found = leak(leaks, "similar")
    # 80 words have 73 runs of 8, 81 have 74
    assert [(m.earlier.id, m.similarity) for m in found.matches] == [
        (str(i), 73 / 74) for i in range(1000)
    ]
