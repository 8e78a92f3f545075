"""A coder with a Python session and a search team with memory: who is told what, and what tools add to it."""

from __future__ import annotations

import json

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from rollout.config.agents import AgentConfig
from rollout.config.environment import EnvConfig
from rollout.environments.code import pack_test
from rollout.records.trajectory import Task
from rollout.sandbox.judge import StdinTest
from tests.support.shipped import Library, play_shipped

TESTS = [StdinTest(stdin=f"{n} {n}\n", expected=f"{2 * n}\n") for n in (1, 2)]
SUM = Task(
    id="t",
    prompt="Print the sum.",
    answers=tuple(pack_test(test, visible=i == 0) for i, test in enumerate(TESTS)),
    env="code",
    source="s",
    split="train",
)
ASKED = Task(
    id="q", prompt="Who wrote it?", answers=("Alice",), env="search", source="s", split="train"
)
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"


def call(tool: str, **arguments: str) -> str:
    return f"```tool\n{json.dumps({'name': tool, 'arguments': arguments})}\n```"


@pytest.mark.slow
def test_the_coder_tries_things_out_and_hears_its_reviewer() -> None:
    trajectory = play_shipped(
        "tool_coder",
        SUM,
        [
            call("python", code="x = 20 + 1") + "\n" + call("calculator", expression="1 / 4"),
            call("python", code="print(2 * x)"),
            "```python\nprint(0)\n```",
            "<reflection>Read the numbers.</reflection>",
            RIGHT,
        ],
    )
    assert [(turn.agent, turn.chat) for turn in trajectory.turns] == [
        *[("coder", "coder/0")] * 3,
        ("reviewer", "reviewer/0"),
        ("coder", "coder/0"),
    ]
    assert [
        (event.tool, event.result, event.after_turn)
        for event in trajectory.tools
        if event.tool != "run"
    ] == [
        ("python", "[no output]", 0),
        ("calculator", "1/4 = 0.25", 0),
        ("python", "42", 1),  # the session knows x
    ]
    # the last two by the step that they led to
    assert [turn.scores.get("pass_rate") for turn in trajectory.turns] == [
        None,
        None,
        0.0,
        1.0,
        1.0,
    ]
    last = [(message.role, message.content) for message in trajectory.turns[4].messages]
    assert last[1:6:2] == [
        ("user", last[1][1]),
        ("tool", "[no output]"),
        ("assistant", ""),
    ]
    assert last[-1] == (
        "user",
        "Test 1: wrong answer\nInput: 1 1\nExpected: 2\nOutput: 0\n\nRead the numbers.",
    )
    assert trajectory.outcome == 1.0
    before = trajectory.turns[2]
    said = before.prompt_ids + before.completion_ids
    assert trajectory.turns[4].prompt_ids[: len(said)] == said


def test_lead_and_scout_remember() -> None:
    library = Library()
    trajectory = play_shipped(
        "memory_search",
        ASKED,
        [
            "<search> the author </search>",
            call("search", query="author"),
            "<evidence> Bob or Alice. </evidence>",
            "<search> which of them </search>",
            "I know that: Alice.",
            "<answer> Alice </answer>",
        ],
        retriever=library,
    )
    assert [turn.agent for turn in trajectory.turns] == [
        "lead",
        "scout",
        "scout",
        "lead",
        "scout",
        "lead",
    ]
    assert [query for query, _ in library.asked] == ["author"]
    assert [event.tool for event in trajectory.tools] == ["search"]  # once, by the environment
    scout = [message.content for message in trajectory.turns[4].messages]
    assert "author 1" in scout[3] and scout[-1] == "which of them"
    lead = [(message.role, message.content) for message in trajectory.turns[5].messages[-3:]]
    assert lead == [
        ("user", "Bob or Alice."),
        ("assistant", "<search> which of them </search>"),
        ("user", "I know that: Alice."),
    ]
    assert (trajectory.outcome, trajectory.metrics["searches"]) == (1.0, 1.0)


def test_a_lead_that_never_answers_has_none() -> None:
    trajectory = play_shipped("memory_search", ASKED, ["I wonder."], retriever=Library())
    assert (trajectory.outcome, trajectory.answer, trajectory.turns[0].valid) == (0.0, "", False)


def test_tools_of_an_orchestra_without_chats_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.check(
            resolve(["experiment=demo_math", "+agents.solver.tools={calculator: {}}"]), "here"
        )
    assert "agent 'solver' has tools, and orchestra 'solver_verifier' opens no chats" in str(
        caught.value
    )


def test_who_sums_up_chats_is_asked_with_the_conversation_alone() -> None:
    def folded_by(name: str) -> RunConfig:
        summing = "+agents.summing={role: chat_summariser, policy: shared}"
        fold = f"+agents.reviewer.chats={{when_full: fold, summariser: {name}}}"
        return RunConfig.check(resolve(["experiment=demo_coder", summing, fold]), "here")

    assert folded_by("summing").agents["reviewer"].chats.summariser == "summing"
    for name in ("nobody", "coder"):  # the coder's template has the slot {problem}
        with pytest.raises(
            ConfigError,
            match=rf"chats.summariser '{name}': expected an agent whose user template has",
        ):
            folded_by(name)


def test_the_search_tool_needs_an_environment_that_searches() -> None:
    team = {"coder": AgentConfig(policy="p", tools={"search": {}})}
    EnvConfig(name="search").check_tools(team)
    with pytest.raises(
        ValueError, match="agent 'coder': tool 'search' asks env 'search', and this is env 'code'"
    ):
        EnvConfig(name="code").check_tools(team)
