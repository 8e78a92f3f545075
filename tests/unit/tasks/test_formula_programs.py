"""Short programs to write, and chats of the coding team that show how."""

from __future__ import annotations

from collections import Counter

import pytest

from rollout.environments.code import unpack_test
from rollout.environments.fenced_programs import last_program
from rollout.environments.protocol import last_tag
from rollout.sandbox.judge import StdinTest
from rollout.tasks.formula_programs import FORMULAS, program_tasks
from rollout.tasks.leaks import find_leaks
from rollout.tasks.splits import SPLITS
from tests.support.demonstrations import make_demonstrations


@pytest.mark.slow
def test_splits_have_different_programs_with_right_examples() -> None:
    tasks = program_tasks(3, {"train": 400, "validation": 50, "test": 60})
    splits = {split: [task for task in tasks if task.split == split] for split in SPLITS}
    assert [len(members) for members in splits.values()] == [400, 50, 60]
    assert not any(leak.is_certain for leak in find_leaks(splits, threshold=None))
    for task in tasks:
        _, expression, _, example = task.id.split(":")
        a, b = map(int, example.split(","))
        test, is_visible = unpack_test(task.answers[0])
        assert is_visible
        assert isinstance(test, StdinTest)
        assert test.expected == f"{FORMULAS[expression].value(a, b)}\n"


@pytest.mark.slow
def test_more_tasks_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="draws in a row gave no new one"):
        program_tasks(1, {"test": 5000})


@pytest.mark.slow
def test_a_coder_that_never_slips_tries_the_formula_and_hands_it_in() -> None:
    demonstrations = make_demonstrations("demo_coder", 20, slips={}, episodes=20)
    # the reviewer is not asked about right programs
    assert {demonstration.agent for demonstration in demonstrations} == {"coder"}
    for demonstration in demonstrations:
        roles = [message.role for message in demonstration.messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        system, task, attempt, result, program = (
            message.content for message in demonstration.messages
        )
        assert "- python:" in system
        assert task.startswith("Read two numbers")
        assert attempt.count("```tool") == 2
        value = task.rpartition(" ")[2].removesuffix(".")
        assert result.endswith(f"Result of the tool:\n{value}")
        code = last_program(program) or ""
        formula = code.rpartition("print(")[2].rstrip(")\n")
        assert formula in attempt


@pytest.mark.slow
def test_careless_coders_are_well_formed_and_often_wrong() -> None:
    demonstrations = make_demonstrations("demo_coder", 150, episodes=60)
    agents = Counter(demonstration.agent for demonstration in demonstrations)
    assert agents["reviewer"] > 15

    right_values = 0
    for demonstration in demonstrations:
        last = demonstration.messages[-1].content
        if demonstration.agent == "reviewer":
            assert last_tag(last, "reflection")
            continue
        assert last_program(last)
        value = demonstration.messages[1].content.split(" it is ")[1].rstrip(".")
        right_values += value in demonstration.messages[3].content
    # the coder slips with probability 0.6, and some wrong formulas give the example's value too
    assert 0.3 < right_values / agents["coder"] < 0.6


@pytest.mark.slow
def test_demonstrations_are_reproducible() -> None:
    first = make_demonstrations("demo_coder", 5, episodes=2)
    assert first == make_demonstrations("demo_coder", 5, episodes=2)
