"""Orchestras `tool_coder` and `memory_search`, whose agents hold chats, and their configs."""

from __future__ import annotations

import json

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from rollout.config.agents import AgentConfig
from rollout.config.environment import EnvConfig
from rollout.environments.code import pack_test
from rollout.records.trajectory import Task, Turn
from rollout.sandbox.judge import StdinTest
from tests.support.casts import scores, speakers
from tests.support.shipped import Library, play_shipped

VISIBLE = StdinTest(stdin="1 1\n", expected="2\n")
HIDDEN = StdinTest(stdin="2 2\n", expected="4\n")
CODE_TASK = Task(
    id="t",
    prompt="Print the sum.",
    answers=(pack_test(VISIBLE, visible=True), pack_test(HIDDEN, visible=False)),
    env="code",
    source="s",
    split="train",
)
SEARCH_TASK = Task(
    id="q", prompt="Who wrote it?", answers=("Alice",), env="search", source="s", split="train"
)
WRONG_PROGRAM = "```python\nprint(0)\n```"
RIGHT_PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"


def call(tool: str, **arguments: str) -> str:
    """Return the text of a tool call."""
    return f"```tool\n{json.dumps({'name': tool, 'arguments': arguments})}\n```"


def messages(turn: Turn) -> list[tuple[str, str]]:
    """Return role and content of the messages that a turn answers."""
    return [(message.role, message.content) for message in turn.messages]


@pytest.mark.slow
def test_the_coder_uses_tools_and_reads_the_review() -> None:
    trajectory = play_shipped(
        "tool_coder",
        CODE_TASK,
        [
            call("python", code="x = 20 + 1") + "\n" + call("calculator", expression="1 / 4"),
            call("python", code="print(2 * x)"),
            WRONG_PROGRAM,
            "<reflection>Read the numbers.</reflection>",
            RIGHT_PROGRAM,
        ],
    )
    assert [turn.chat for turn in trajectory.turns] == [*["coder/0"] * 3, "reviewer/0", "coder/0"]
    assert speakers(trajectory) == [*["coder"] * 3, "reviewer", "coder"]
    calls = [event for event in trajectory.tools if event.tool != "run"]
    assert [(event.tool, event.result, event.after_turn) for event in calls] == [
        ("python", "[no output]", 0),
        ("calculator", "1/4 = 0.25", 0),
        ("python", "42", 1),  # x is still defined
    ]
    # The reviewer's turn has the pass rate that the next step of the environment measured.
    assert scores(trajectory, "pass_rate") == [None, None, 0.0, 1.0, 1.0]
    assert trajectory.outcome == 1.0

    last_messages = messages(trajectory.turns[4])
    assert [role for role, _ in last_messages[1:6:2]] == ["user", "tool", "assistant"]
    assert last_messages[3] == ("tool", "[no output]")
    assert last_messages[5] == ("assistant", "")
    result = "Test 1: wrong answer\nInput: 1 1\nExpected: 2\nOutput: 0"
    assert last_messages[-1] == ("user", f"{result}\n\nRead the numbers.")

    earlier_turn = trajectory.turns[2]
    earlier_ids = earlier_turn.prompt_ids + earlier_turn.completion_ids
    assert trajectory.turns[4].prompt_ids[: len(earlier_ids)] == earlier_ids


def test_lead_and_scout_remember_their_chats() -> None:
    library = Library()
    trajectory = play_shipped(
        "memory_search",
        SEARCH_TASK,
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
    assert speakers(trajectory) == ["lead", "scout", "scout", "lead", "scout", "lead"]
    assert [query for query, _ in library.searches] == ["author"]
    assert [event.tool for event in trajectory.tools] == ["search"]
    assert trajectory.outcome == 1.0
    assert trajectory.metrics["searches"] == 1.0

    scout_messages = messages(trajectory.turns[4])
    assert "author 1" in scout_messages[3][1]
    assert scout_messages[-1] == ("user", "which of them")
    assert messages(trajectory.turns[5])[-3:] == [
        ("user", "Bob or Alice."),
        ("assistant", "<search> which of them </search>"),
        ("user", "I know that: Alice."),
    ]


def test_a_malformed_reply_of_the_lead_ends_the_task_without_an_answer() -> None:
    trajectory = play_shipped("memory_search", SEARCH_TASK, ["I wonder."], retriever=Library())
    assert trajectory.outcome == 0.0
    assert trajectory.answer == ""
    assert trajectory.turns[0].valid is False


def test_tools_are_refused_in_an_orchestra_without_chats() -> None:
    overrides = ["experiment=demo_math", "+agents.solver.tools={calculator: {}}"]
    expected = "agent 'solver' has tools, and orchestra 'solver_verifier' opens no chats with it"
    with pytest.raises(ConfigError, match=expected):
        RunConfig.from_values(resolve(overrides), "here")


def config_with_summariser(name: str) -> RunConfig:
    """Return a config in which `name` sums up the reviewer's chats; `summing` is an agent for it."""
    summing = "+agents.summing={role: chat_summariser, policy: shared}"
    chats = f"+agents.reviewer.chats={{when_full: fold, summariser: {name}}}"
    return RunConfig.from_values(resolve(["experiment=demo_coder", summing, chats]), "here")


def test_the_summariser_of_a_chat_is_an_agent_with_the_slot_conversation() -> None:
    config = config_with_summariser("summing")
    assert config.agents["reviewer"].chats.summariser == "summing"


@pytest.mark.parametrize("name", ["nobody", "coder"])  # the coder's template has other slots
def test_other_summarisers_are_refused(name: str) -> None:
    expected = rf"chats.summariser '{name}': expected an agent whose user template has"
    with pytest.raises(ConfigError, match=expected):
        config_with_summariser(name)


def test_the_search_tool_needs_an_environment_that_searches() -> None:
    team = {"coder": AgentConfig(policy="p", tools={"search": {}})}
    EnvConfig(name="search").check_tools(team)
    expected = "agent 'coder': tool 'search' asks env 'search', and this is env 'code'"
    with pytest.raises(ValueError, match=expected):
        EnvConfig(name="code").check_tools(team)
