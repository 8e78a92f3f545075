"""Generated sums: exact, disjoint between splits, and demonstrated as they are played."""

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from rollout.environments.math_notation import last_boxed
from rollout.orchestras.replies import parse_approval, parse_boxed
from rollout.tasks import GENERATORS
from rollout.tasks.arithmetic import (
    LEVELS,
    Slip,
    arithmetic_demonstrations,
    arithmetic_tasks,
    review,
    work_out,
    work_out_wrongly,
)
from rollout.teams.roles import ROLES

SHORT = {
    "solver": replace(ROLES["solver"], system="", user="{team_context}{problem}"),
    "verifier": replace(ROLES["verifier"], system="", user="Check: {problem}\n{solution}"),
}


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def operation(prompt):
    return "-" if re.search(r"\d-\d|left|missing", prompt) else "+"


def sum_of(prompt):
    """The sum a prompt asks for, whatever the order and wording."""
    return operation(prompt), tuple(sorted(numbers(prompt)))


@pytest.mark.parametrize(
    ("sign", "operands", "expected"),
    [
        ("+", (347, 285), "7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{632}"),
        ("+", (58, 71), "8+1=9, 5+7=12. \\boxed{129}"),
        ("+", (95, 88, 17), "5+8+7=20, 9+8+1+2=20. \\boxed{200}"),
        ("-", (342, 285), "12-5=7, 14-8-1=5, 3-2-1=0. \\boxed{57}"),
        ("-", (60, 10), "0-0=0, 6-1=5. \\boxed{50}"),
        ("-", (402, 203), "12-3=9, 10-0-1=9, 4-2-1=1. \\boxed{199}"),
    ],
)
def test_columns(sign, operands, expected):
    assert work_out(sign, operands) == expected


@pytest.mark.parametrize(
    ("slip", "expected"),
    [
        (Slip(kind="copy", column=0, amount=1), "7+6=13, 4+8+1=13, 3+2+1=6. \\boxed{633}"),
        (Slip(kind="sum", column=1, amount=-1), "7+5=12, 4+8+1=12, 3+2+1=6. \\boxed{622}"),
        (Slip(kind="carry", column=0, amount=1), "7+5=12, 4+8=12, 3+2+1=6. \\boxed{622}"),
        (Slip(kind="result", column=2, amount=2), "7+5=12, 4+8+1=13, 3+2+1=6. \\boxed{832}"),
    ],
)
def test_slips(slip, expected):
    assert work_out("+", (347, 285), slip) == expected


def test_written_solutions_are_right_and_wrong_ones_are_wrong():
    random = Random(0)
    for _ in range(1000):
        sign, width = random.choice("+-"), random.choice((2, 3))
        pair = sorted(
            (random.randint(10 ** (width - 1), 10**width - 1) for _ in range(2)), reverse=True
        )
        answer = sum(pair) if sign == "+" else pair[0] - pair[1]
        assert last_boxed(work_out(sign, pair)) == str(answer)
        wrong, slip = work_out_wrongly(random, sign, pair)
        assert last_boxed(wrong) != str(answer)
        assert wrong == work_out(sign, pair, slip)


@pytest.mark.parametrize(
    ("slip", "expected"),
    [
        (None, "ok, ok, ok. <verify>approve</verify>"),
        (Slip(kind="sum", column=1, amount=1), "ok, no, ok. <verify>reject</verify>"),
        (Slip(kind="carry", column=0, amount=1), "ok, no, ok. <verify>reject</verify>"),
        (Slip(kind="carry", column=2, amount=1), "ok, ok, no. <verify>reject</verify>"),
    ],
)
def test_reviews_blame_the_column_where_the_slip_shows(slip, expected):
    assert review((347, 285), slip) == expected


def test_answers_are_exact():
    for task in arithmetic_tasks(0, {"train": 600}):
        first, *rest = numbers(task.prompt)
        expected = first - sum(rest) if operation(task.prompt) == "-" else first + sum(rest)
        assert task.answers == (str(expected),)


def test_no_sum_is_in_two_splits_whatever_its_order_or_wording():
    seen = {}
    for seed in range(3):
        for task in arithmetic_tasks(seed, {"train": 1500, "validation": 150, "test": 150}):
            assert seen.setdefault(sum_of(task.prompt), task.split) == task.split


def test_demonstrations_use_training_sums_only():
    held_out = {sum_of(t.prompt) for t in arithmetic_tasks(0, {"validation": 600, "test": 600})}
    for demonstration in arithmetic_demonstrations(0, 2000, roles=SHORT):
        prompt = demonstration.messages[-2].content
        problem = (
            prompt.splitlines()[0].removeprefix("Check: ")
            if demonstration.agent == "verifier"
            else prompt
        )
        assert sum_of(problem.rsplit("\n", 1)[-1]) not in held_out


def test_sizes_sources_and_ids():
    tasks = arithmetic_tasks(7, {"train": 100, "validation": 6, "test": 14})
    assert Counter(task.split for task in tasks) == {"train": 100, "validation": 6, "test": 14}
    assert Counter(task.source for task in tasks if task.split == "validation") == dict.fromkeys(
        LEVELS, 1
    )
    assert max(Counter(task.source for task in tasks if task.split == "train").values()) == 17
    assert len({task.id for task in tasks}) == 120
    assert all(task.env == "math" for task in tasks)


def test_equal_seeds_give_equal_tasks_and_more_extend_fewer():
    few, more = arithmetic_tasks(3, {"test": 24}), arithmetic_tasks(3, {"test": 48})
    assert few == arithmetic_tasks(3, {"test": 24})
    assert {task.id for task in few} <= {task.id for task in more}
    assert {task.id for task in few} != {task.id for task in arithmetic_tasks(4, {"test": 24})}


@pytest.mark.slow
def test_asking_for_more_than_there_is_says_so():
    with pytest.raises(
        ValueError, match=r"add_2digit: \d+ test tasks asked for, .* lower data\.test"
    ):
        arithmetic_tasks(0, {"test": 20_000})


def test_demonstrations_are_balanced_and_legal():
    shown = list(arithmetic_demonstrations(1, 3000, roles=SHORT))
    agents = Counter(demonstration.agent for demonstration in shown)
    assert agents["solver"] > agents["verifier"] > 200
    verdicts = Counter()
    second = Counter()
    for demonstration in shown:
        prompt, reply = demonstration.messages
        assert (prompt.role, reply.role) == ("user", "assistant")
        if demonstration.agent == "verifier":
            problem, solution = prompt.content.removeprefix("Check: ").split("\n")
            first, *rest = numbers(problem)
            answer = first - sum(rest) if operation(problem) == "-" else first + sum(rest)
            right = last_boxed(solution) == str(answer)
            verdicts[parse_approval(reply.content)] += 1
            assert parse_approval(reply.content) == ("approve" if right else "reject")
        else:
            assert parse_boxed(reply.content) is not None
            second["reject" in prompt.content] += 1
    assert 0.8 < verdicts["approve"] / verdicts["reject"] < 1.25
    assert 100 < second[True] < second[False]


def test_demonstrations_continue_where_they_were():
    assert list(arithmetic_demonstrations(5, 30))[:10] == list(arithmetic_demonstrations(5, 10))


def test_demonstrations_take_the_roles_own_prompts_by_default():
    demonstration = next(arithmetic_demonstrations(0, 1))
    assert [message.role for message in demonstration.messages] == ["system", "user", "assistant"]
    assert demonstration.messages[0].content == ROLES[demonstration.agent].system


def test_the_table_names_it():
    assert GENERATORS["arithmetic"].tasks is arithmetic_tasks
    assert GENERATORS["arithmetic"].demonstrations is arithmetic_demonstrations
