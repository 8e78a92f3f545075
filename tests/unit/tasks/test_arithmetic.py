"""Arithmetic tasks: exact answers, disjoint splits, and demonstrations of solver and verifier."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from rollout.environments.math_notation import last_boxed
from rollout.orchestras.replies import parse_approval, parse_boxed
from rollout.tasks.arithmetic import LEVELS, arithmetic_tasks
from rollout.tasks.arithmetic_demonstrations import arithmetic_demonstrations
from rollout.tasks.generators import GENERATORS
from rollout.teams.roles import ROLES

# Roles whose prompts have nothing but the problem and the team's context.
SHORT_ROLES = {
    "solver": replace(ROLES["solver"], system="", user="{team_context}{problem}"),
    "verifier": replace(ROLES["verifier"], system="", user="Check: {problem}\n{solution}"),
}


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def operation_of(prompt: str) -> str:
    return "-" if re.search(r"\d-\d|left|missing", prompt) else "+"


def answer_of(prompt: str) -> int:
    first, *rest = numbers_in(prompt)
    return first - sum(rest) if operation_of(prompt) == "-" else first + sum(rest)


def sum_of(prompt: str) -> tuple[str, tuple[int, ...]]:
    """Return operation and numbers of a prompt, whatever its order and wording."""
    return operation_of(prompt), tuple(sorted(numbers_in(prompt)))


class TestTasks:
    def test_answers_are_exact(self) -> None:
        for task in arithmetic_tasks(0, {"train": 600}):
            assert task.answers == (str(answer_of(task.prompt)),)

    def test_no_sum_is_in_two_splits_whatever_its_order_or_wording(self) -> None:
        split_of_sum: dict[tuple[str, tuple[int, ...]], str] = {}
        for seed in range(3):
            for task in arithmetic_tasks(seed, {"train": 1500, "validation": 150, "test": 150}):
                split = split_of_sum.setdefault(sum_of(task.prompt), task.split)
                assert split == task.split

    def test_sources_have_equal_shares_and_ids_differ(self) -> None:
        tasks = arithmetic_tasks(7, {"train": 100, "validation": 6, "test": 14})
        assert Counter(task.split for task in tasks) == {"train": 100, "validation": 6, "test": 14}
        validation = Counter(task.source for task in tasks if task.split == "validation")
        assert validation == dict.fromkeys(LEVELS, 1)
        train = Counter(task.source for task in tasks if task.split == "train")
        assert max(train.values()) == 17
        assert len({task.id for task in tasks}) == 120
        assert all(task.env == "math" for task in tasks)

    def test_equal_seeds_give_equal_tasks_and_larger_sizes_extend_smaller_ones(self) -> None:
        tasks = arithmetic_tasks(3, {"test": 24})
        ids = {task.id for task in tasks}
        assert tasks == arithmetic_tasks(3, {"test": 24})
        assert ids <= {task.id for task in arithmetic_tasks(3, {"test": 48})}
        assert ids != {task.id for task in arithmetic_tasks(4, {"test": 24})}

    @pytest.mark.slow
    def test_more_tasks_than_there_are_is_an_error(self) -> None:
        message = r"add_2digit: data\.test asks for \d+ different tasks, .* lower data\.test"
        with pytest.raises(ValueError, match=message):
            arithmetic_tasks(0, {"test": 20_000})


class TestDemonstrations:
    def test_they_are_about_training_problems(self) -> None:
        held_out_tasks = arithmetic_tasks(0, {"validation": 600, "test": 600})
        held_out = {sum_of(task.prompt) for task in held_out_tasks}
        for demonstration in arithmetic_demonstrations(0, 2000, roles=SHORT_ROLES):
            prompt = demonstration.messages[-2].content
            problem = prompt.splitlines()[-1]
            if demonstration.agent == "verifier":
                problem = prompt.splitlines()[0].removeprefix("Check: ")
            assert sum_of(problem) not in held_out

    def test_verdicts_are_right_and_balanced(self) -> None:
        verdicts: Counter[str | None] = Counter()
        for demonstration in arithmetic_demonstrations(1, 3000, roles=SHORT_ROLES):
            if demonstration.agent != "verifier":
                continue
            prompt, reply = demonstration.messages
            problem, solution = prompt.content.removeprefix("Check: ").split("\n")
            is_right = last_boxed(solution) == str(answer_of(problem))
            verdict = parse_approval(reply.content)
            assert verdict == ("approve" if is_right else "reject")
            verdicts[verdict] += 1
        assert 0.8 < verdicts["approve"] / verdicts["reject"] < 1.25

    def test_replies_are_legal_and_first_attempts_most_frequent(self) -> None:
        agents: Counter[str] = Counter()
        second_attempts = 0
        for demonstration in arithmetic_demonstrations(1, 3000, roles=SHORT_ROLES):
            prompt, reply = demonstration.messages
            assert prompt.role == "user"
            assert reply.role == "assistant"
            agents[demonstration.agent] += 1
            if demonstration.agent == "solver":
                assert parse_boxed(reply.content) is not None
                second_attempts += "reject" in prompt.content
        assert agents["solver"] > agents["verifier"] > 200
        assert 100 < second_attempts < agents["solver"] / 2

    def test_a_team_without_a_solver_demonstrates_first_attempts(self) -> None:
        role = SHORT_ROLES["solver"]
        agents: Counter[str] = Counter()
        for demonstration in arithmetic_demonstrations(1, 400, roles={"a": role, "b": role}):
            (prompt, reply) = demonstration.messages
            assert parse_boxed(reply.content) is not None
            assert "reject" not in prompt.content
            agents[demonstration.agent] += 1
        assert set(agents) == {"a", "b"}
        assert 0.8 < agents["a"] / agents["b"] < 1.25

    def test_larger_numbers_extend_smaller_ones(self) -> None:
        demonstrations = list(arithmetic_demonstrations(5, 30))
        assert demonstrations[:10] == list(arithmetic_demonstrations(5, 10))

    def test_prompts_are_those_of_the_roles(self) -> None:
        demonstration = next(arithmetic_demonstrations(0, 1))
        roles = [message.role for message in demonstration.messages]
        assert roles == ["system", "user", "assistant"]
        assert demonstration.messages[0].content == ROLES[demonstration.agent].system


def test_the_generator_is_registered() -> None:
    assert GENERATORS["arithmetic"].tasks is arithmetic_tasks
    assert GENERATORS["arithmetic"].demonstrations is arithmetic_demonstrations
