"""Demonstrations of teams that hold chats: what teachers say in the real team, with its real tools."""

from __future__ import annotations

from collections import Counter

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.base_model import run_demonstrations
from rollout.environments.code import last_program, unpack_test
from rollout.environments.protocol import last_tag
from rollout.records.trajectory import Demonstration
from rollout.tasks.chats import WORDED_FORMULAS, program_tasks
from rollout.tasks.splits import find_leaks


def shown(experiment: str, n: int, **options: object) -> list[Demonstration]:
    config = RunConfig.check(resolve([f"experiment={experiment}"]), experiment)
    assert config.cold_start is not None
    cold_start = config.cold_start.model_copy(
        update={"options": config.cold_start.options | options}
    )
    return list(run_demonstrations(config, cold_start, n))


def by_agent(demonstrations: list[Demonstration]) -> Counter[str]:
    return Counter(demonstration.agent for demonstration in demonstrations)


@pytest.mark.slow
def test_coders_who_never_slip_try_a_formula_and_hand_it_in() -> None:
    found = shown("demo_coder", 20, slips={}, episodes=20)
    assert by_agent(found) == {"coder": 20}  # nobody is asked for a review of what is right
    for demonstration in found:
        system, asked, tried, told, program = demonstration.messages
        assert [m.role for m in demonstration.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert "- python:" in system.content and asked.content.startswith("Read two numbers")
        assert tried.content.count("```tool") == 2
        value = asked.content.rpartition(" ")[2].removesuffix(".")
        assert told.content.endswith(f"Result of the tool:\n{value}")  # what the session printed
        assert (last_program(program.content) or "").rpartition("print(")[2].rstrip(
            ")\n"
        ) in tried.content


@pytest.mark.slow
def test_careless_coders_are_well_formed_and_often_wrong() -> None:
    found = shown("demo_coder", 150, episodes=60)
    assert by_agent(found)["reviewer"] > 15
    coders = [d for d in found if d.agent == "coder"]
    first = [
        d.messages[1].content.split(" it is ")[1].rstrip(".") in d.messages[3].content
        for d in coders
    ]
    assert (
        0.3 < sum(first) / len(first) < 0.6
    )  # with a slip in 0.6, some of which give the example's value too
    assert all(last_program(d.messages[-1].content) for d in coders)
    assert all(
        last_tag(d.messages[-1].content, "reflection") for d in found if d.agent == "reviewer"
    )
    assert shown("demo_coder", 5, episodes=2)[:2] == shown("demo_coder", 5, episodes=2)[:2]


@pytest.mark.slow
def test_programs_are_different_in_every_split() -> None:
    tasks = program_tasks(3, {"train": 400, "validation": 50, "test": 60})
    splits = {
        name: [t for t in tasks if t.split == name] for name in ("train", "validation", "test")
    }
    assert [len(found) for found in splits.values()] == [400, 50, 60]
    assert not [leak for leak in find_leaks(splits, threshold=None) if leak.exact]
    for task in tasks:
        _, formula, _, example = task.id.split(":")
        a, b = map(int, example.split(","))
        (test, visible), *_ = (unpack_test(text) for text in task.answers)
        assert visible and test.expected == f"{WORDED_FORMULAS[formula][0](a, b)}\n"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="there are hardly more"):
        program_tasks(1, {"test": 5000})


def test_a_lead_who_never_slips_asks_its_scout_and_answers() -> None:
    found = shown("demo_memory", 60, slips={}, episodes=30)
    assert by_agent(found) == {"lead": 30, "scout": 30}
    hops = Counter(
        sum(m.role == "assistant" for m in d.messages) for d in found if d.agent == "lead"
    )
    assert set(hops) == {2, 3} and min(hops.values()) > 5  # one or two questions, and an answer
    for lead, scout in zip(found[::2], found[1::2], strict=True):
        answer = last_tag(lead.messages[-1].content, "answer")
        assert answer and answer in scout.messages[-1].content  # from what the scout last reported
        assert "<evidence>" in scout.messages[-1].content


@pytest.mark.slow
def test_a_careless_lead_answers_too_early() -> None:
    leads = [d for d in shown("demo_memory", 400, episodes=200) if d.agent == "lead"]
    early = [len(lead.messages) == 2 for lead in leads]
    assert 0.25 < sum(early) / len(early) < 0.45  # with a slip in 0.35
