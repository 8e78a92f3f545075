"""Chats: tokens of earlier turns, tools and their limits, malformed calls, and full chats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.credit.samples import to_samples
from mcore_mas.packing.pack import pack
from mcore_mas.training.metrics import rollout_metrics
from rollout.base.errors import PromptTooLong
from rollout.engines import EngineClient
from rollout.environments.protocol import AgentMistake
from rollout.environments.tools import Tool, tool_of
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Group, Message, Sampling, Status, Trajectory
from rollout.teams.chat import Chat
from rollout.teams.collect import Deadlines
from rollout.teams.roles import Agent, AgentReply, ChatRules, Role
from rollout.teams.team import Team, TeamSession
from rollout.teams.tree import Branching
from tests.support.error_texts import without_location
from tests.support.play import SEED, STEP, TASK, Adder, collect, number
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import call, renderer_of


@asynccontextmanager
async def counting() -> AsyncIterator[list[Tool]]:
    """Return a context with a tool that counts in one trajectory, and can fail."""
    count = 0

    async def count_on(*, by: int) -> str:
        """Count on.

        Args:
            by: how far
        """
        nonlocal count
        if by < 0:
            raise AgentMistake("count_on: only forwards")
        if by > 99:
            raise RuntimeError("the counter broke")
        count += by
        return f"now {count}"

    yield [tool_of(count_on)]


Orchestra = Callable[..., Awaitable[None]]


def play(
    renderer: Renderer,
    orchestra: Orchestra,
    *replies: str,
    rules: ChatRules | None = None,
    max_length: int | None = None,
    reply_to: Callable[[str], str] | None = None,
    **options: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    """Play one trajectory of the agents `a`, which has tools, and `b`, which sums up.

    Args:
        replies: texts of the replies, in the order of the calls.
        reply_to: returns the reply to a prompt, in place of `replies`.
    """

    def reply_ids(prompt: Sequence[int], call: int) -> tuple[int, ...]:
        text = replies[call] if reply_to is None else reply_to(decoded(renderer, prompt))
        return (*renderer.encode(text), renderer.stop[0])

    engine = ScriptedEngine(reply_ids)
    role = Role(name="r", system="S", user="{conversation}", parse=number)
    a = Agent(
        name="a",
        role=role,
        policy="p",
        sampling=Sampling(max_tokens=400),
        chats=rules or ChatRules(),
        tools={"counting": counting},
    )
    b = replace(a, name="b", tools={}, role=replace(role, system=""))
    client = EngineClient(engine=engine, renderer=renderer, max_length=max_length)
    team = Team({"a": a, "b": b}, {"p": client})
    (group,) = asyncio.run(
        collect([TASK], team, Adder, orchestra, group_size=1, seed=SEED, step=STEP, **options)
    )
    return group.trajectories[0], engine


async def answer(chat: Chat, env: Any, *questions: str) -> None:
    for question in questions:
        await chat.say(question)
        await chat.run(max_turns=5)
    await env.step("1")


async def one_chat(task: Any, team: Any, env: Any) -> None:
    await answer(team.chat("a"), env, "one?", "two?")


def decoded(renderer: Renderer, ids: Sequence[int]) -> str:
    return renderer.decode_prompt(ids)


def chat_metrics(trajectory: Trajectory, *names: str) -> list[float]:
    """Return metrics of chats for a step with one trajectory."""
    rewarded = replace(
        trajectory, turns=tuple(replace(turn, reward=1.0) for turn in trajectory.turns)
    )
    metrics = rollout_metrics([Group(task=TASK, trajectories=(rewarded,))])
    return [metrics[f"chat/{name}"] for name in names]


def test_a_chat_is_one_path_of_tokens_and_only_replies_train(qwen: Renderer) -> None:
    trajectory, _ = play(
        qwen, one_chat, "  " + call("count_on", '{"by":2}'), "3", call("count_on", '{"by": 5}'), "8"
    )
    assert trajectory.error == ""
    before: tuple[int, ...] = ()
    for turn in trajectory.turns:
        assert turn.prompt_ids[: len(before)] == before
        before = turn.prompt_ids + turn.completion_ids
        assert (turn.chat, turn.valid) == ("a/0", True)
    assert [turn.scores.get("tool_calls") for turn in trajectory.turns] == [1.0, None, 1.0, None]
    # The trajectory has one counter.
    assert [event.result for event in trajectory.tools] == ["now 2", "now 7"]
    assert [(event.after_turn, event.tool, event.query) for event in trajectory.tools] == [
        (0, "count_on", '{"by": 2}'),
        (2, "count_on", '{"by": 5}'),
    ]
    assert "now 2" in decoded(qwen, trajectory.turns[1].prompt_ids)
    rewarded = replace(
        trajectory, turns=tuple(replace(turn, reward=1.0) for turn in trajectory.turns)
    )
    samples = to_samples([Group(task=TASK, trajectories=(rewarded,))])
    (batch,) = pack(
        [replace(s, advantages=(1.0,) * len(s.completion_ids)) for s in samples], 10_000
    )
    assert len(batch.token_ids) == len(before) - 1  # each token once, without the last
    sampled = [token for turn in trajectory.turns for token in turn.completion_ids]
    assert batch.labels.tolist() == sampled  # texts of tools and users are no labels
    metrics = rollout_metrics([Group(task=TASK, trajectories=(rewarded,))])
    assert {name: value for name, value in metrics.items() if name.startswith("chat/")} == {
        "chat/turns": 4.0,
        "chat/calls": 2.0,
        "chat/malformed_calls": 0.0,
        "chat/roots": 0.0,
        "chat/folded": 0.0,
        "chat/dropped_results": 0.0,
        "chat/full": 0.0,
    }


def test_a_template_that_drops_thoughts_makes_a_root(tmp_path: Path) -> None:
    renderer = renderer_of("qwen3", tmp_path)
    thought = "<think>\nhm\n</think>\n\n"
    trajectory, _ = play(
        renderer, one_chat, thought + call("count_on", '{"by": 1}'), f"{thought}3", "8"
    )
    assert [turn.scores.get("root") for turn in trajectory.turns] == [None, None, 1.0]
    assert chat_metrics(trajectory, "roots") == [1.0]
    assert "hm" not in decoded(renderer, trajectory.turns[2].prompt_ids)
    assert trajectory.turns[2].messages[2].reasoning == "hm"


def test_concurrent_messages_of_one_chat_are_refused(
    qwen: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tokens of one reply would be taken for those of another."""
    generate = ScriptedEngine.generate

    async def busy(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return await generate(*arguments)

    monkeypatch.setattr(ScriptedEngine, "generate", busy)

    async def two_at_once(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        await asyncio.gather(chat.say("one?"), chat.say("two?"))

    trajectory, _ = play(qwen, two_at_once, "1", "2")
    assert without_location(trajectory.error).endswith(
        "chat a/0 waits for a reply already; await that call, or open another chat"
    )


def test_malformed_calls_are_answered_and_counted(qwen: Renderer) -> None:
    trajectory, _ = play(
        qwen,
        one_chat,
        "<tool_call>{oops</tool_call>"
        + call("minus")
        + call("count_on", '{"by": "x"}')
        + call("count_on", '{"by": -1}'),
        "1",
        "2",
    )
    first, second, _ = trajectory.turns
    assert (first.valid, first.scores["tool_calls"], first.scores["malformed_calls"]) == (
        False,
        4.0,
        1.0,
    )
    assert [message.content for message in second.messages[-4:]] == [
        'This tool call cannot be read. Write it as JSON: {"name": "...", "arguments": {...}}',
        "There is no tool 'minus'; tools: count_on",
        "count_on: by: 'x' is not of type 'integer'",
        "count_on: only forwards",
    ]
    assert [event.failed for event in trajectory.tools] == [True] * 3
    assert [message.answers for message in second.messages[-4:]] == ["0.0", "0.1", "0.2", "0.3"]


def test_a_broken_tool_fails_its_trajectory(qwen: Renderer) -> None:
    trajectory, _ = play(qwen, one_chat, call("count_on", '{"by": 100}'))
    assert trajectory.status is Status.FAILED
    error = "Defect: tools.count_on: RuntimeError: the counter broke"
    assert without_location(trajectory.error) == error


async def with_endless_tool(task: Any, team: Any, env: Any) -> None:
    async def wait() -> str:
        """Wait without end."""
        await asyncio.Event().wait()
        return "over"

    await answer(team.chat("a", tools=[tool_of(wait)]), env, "one?")


@pytest.mark.parametrize(("call_s", "tool_s"), [(0.05, 5.0), (5.0, 0.05)])
def test_a_tool_call_has_two_deadlines(qwen: Renderer, call_s: float, tool_s: float) -> None:
    trajectory, _ = play(
        qwen,
        with_endless_tool,
        call("wait", "{}"),
        "done",
        rules=ChatRules(call_s=call_s),
        deadlines=Deadlines(tool_s=tool_s),
    )
    if call_s < tool_s:
        assert trajectory.error == ""
        assert [event.result for event in trajectory.tools] == ["wait: nothing came within 0.05 s"]
    else:
        assert trajectory.status is Status.LATE
        assert trajectory.error == "LateTool: tools.wait: nothing came within 0.05 s"


async def with_helpers(task: Any, team: Any, env: Any) -> None:
    """Orchestra whose agent a has a tool that asks agent b two questions at once."""

    async def ask_helpers(*, question: str) -> str:
        """Ask two helpers."""
        first = await team.act("b", conversation=f"{question} first")
        others = [team.act("b", conversation=f"{question} {name}") for name in ("left", "right")]
        replies = [first, *await asyncio.gather(*others)]
        return " ".join(reply.text for reply in replies)

    chat = team.chat("a", tools=[tool_of(ask_helpers, repeat_on_replay=True)])
    await answer(chat, env, "one?")


def helper_reply(prompt: str) -> str:
    if "one?" not in prompt:
        return "5"
    return "done" if "5 5 5" in prompt else call("ask_helpers", '{"question": "how"}')


@pytest.mark.parametrize("tool_s", [None, 60.0])  # a tool with a deadline runs in a task of its own
@pytest.mark.parametrize("width", [None, 2])
def test_a_tool_may_ask_agents(qwen: Renderer, width: int | None, tool_s: float | None) -> None:
    trajectory, _ = play(
        qwen,
        with_helpers,
        reply_to=helper_reply,
        tree=Branching(width=width) if width else None,
        deadlines=Deadlines(tool_s=tool_s, trajectory_s=60.0),
    )
    assert trajectory.error == ""
    path = trajectory.path
    assert [turn.agent for turn in path] == ["a", "b", "b", "b", "a"]
    assert [message.content for message in path[-1].messages if message.role == "tool"] == ["5 5 5"]
    if width:  # a, then b, then b twice, then a
        assert [turn.node for turn in path] == ["0", "0.0", "0.0.0", "0.0.0", "0.0.0.0"]
    else:
        assert [event.result for event in trajectory.tools] == ["5 5 5"]


def test_calls_are_limited_per_turn_per_trajectory_and_in_length(qwen: Renderer) -> None:
    two = call("count_on", '{"by": 1}') * 2
    rules = ChatRules(calls_per_turn=1, calls=2, result_chars=6)
    trajectory, _ = play(
        qwen, one_chat, two, two, "1", call("count_on", '{"by": 1}'), "2", rules=rules
    )
    results = [m.content for m in trajectory.turns[-1].messages if m.role == "tool"]
    assert results == [
        "now 1",
        "This call was not made: a reply may make 1.",
        "now 2",
        "This call was not made: a reply may make 1.",
        "This call was not made: all 2 calls are spent. Answer without tools.",
    ]
    trajectory, _ = play(
        qwen, one_chat, call("count_on", '{"by": 99}'), "1", "2", rules=ChatRules(result_chars=4)
    )
    assert trajectory.tools[0].result == "no\n[... 2 characters ...]\n99"


def test_results_can_be_given_by_the_orchestra_and_open_calls_are_answered(qwen: Renderer) -> None:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        other = team.chat("a", system="T", tools=())
        reply = await chat.say("go")
        assert [c.name for c in reply.calls] == ["f", "g"]
        assert await chat.tool(reply.calls[1].id, "G") is None
        with pytest.raises(KeyError, match=r"chat a/0: no call 'x' waits; open: 0\.0"):
            await chat.tool("x", "?")
        again = await chat.tool(reply.calls[0].id, "F")
        assert [c.name for c in again.calls] == ["h"]
        await chat.say("stop that")
        assert (await other.say(call("f"))).calls == ()  # without tools a call is only text
        await env.step("1")

    trajectory, _ = play(qwen, orchestra, call("f") + call("g"), call("h"), "ok", call("f"))
    assert trajectory.error == ""
    assert [turn.chat for turn in trajectory.turns] == ["a/0", "a/0", "a/0", "a/1"]
    messages = [(message.role, message.content) for message in trajectory.turns[2].messages[2:]]
    assert messages == [
        ("assistant", ""),
        ("tool", "G"),
        ("tool", "F"),
        ("assistant", ""),
        ("tool", "This tool was not called: there were no turns left for it."),
        ("user", "stop that"),
    ]


def test_a_full_chat_stops_folds_or_drops_its_oldest_results(qwen: Renderer) -> None:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a", tools=())
        for question in ("first", "x" * 60, "y" * 60):
            await chat.say(question)
        assert chat.full is (rules.when_full == "stop")
        await env.step("1")

    rules = ChatRules()
    trajectory, engine = play(qwen, orchestra, "one", "two", rules=rules, max_length=550)
    assert trajectory.error == ""
    assert len(engine.calls) == 2
    assert [turn.scores.get("full") for turn in trajectory.turns] == [None, 1.0]
    assert chat_metrics(trajectory, "full", "folded") == [1.0, 0.0]

    rules = ChatRules(when_full="fold", summariser="b")
    trajectory, _ = play(
        qwen, orchestra, "one", "two", "short", "three", rules=rules, max_length=550
    )
    assert trajectory.error == ""
    assert [(turn.agent, turn.index) for turn in trajectory.turns] == [
        ("a", 0),
        ("a", 1),
        ("b", 2),
        ("a", 3),
    ]
    last = trajectory.turns[3]
    assert last.messages[-1].content == f"first\n\nWhat has happened since:\nshort\n\n{'y' * 60}"
    assert (last.scores["folded"], last.scores["root"], len(last.messages)) == (1.0, 1.0, 2)
    assert chat_metrics(trajectory, "full", "folded") == [0.0, 1.0]
    assert trajectory.turns[2].messages[-1].content.endswith("assistant: two\n\nuser: " + "y" * 60)


@pytest.mark.parametrize(
    "rules",
    [ChatRules(when_full="drop_oldest_results"), ChatRules(when_full="fold", summariser="b")],
)
def test_a_chat_that_cannot_be_shortened_is_full(
    rules: ChatRules, qwen: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(self: TeamSession, name: str, /, **slots: object) -> AgentReply:
        raise PromptTooLong("the summariser's template is too long")

    monkeypatch.setattr(TeamSession, "act", no_room)

    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a", tools=())
        await chat.say("first")
        reply = await chat.say("x" * 600)
        assert (chat.full, reply) == (True, chat.latest)
        await env.step("1")

    trajectory, engine = play(qwen, orchestra, "one", rules=rules, max_length=550)
    assert trajectory.error == ""
    assert len(engine.calls) == 1
    assert [turn.scores.get("full") for turn in trajectory.turns] == [1.0]


def unplayed_session() -> TeamSession:
    role = Role(name="r", system="S", user="", parse=number)
    agent = Agent(name="a", role=role, policy="p", sampling=Sampling())
    return Team({"a": agent}, {}).session(SEED)


@pytest.mark.parametrize(
    ("replied", "expected"),
    [
        (True, "go\n\nWhat has happened since:\nnothing\n\ngo"),
        (False, "What has happened since:\nnothing\n\ngo"),
    ],
)
def test_a_summary_stands_before_the_messages_without_a_reply(replied: bool, expected: str) -> None:
    chat = unplayed_session().chat("a")
    question = Message(role="user", content="go")
    if replied:
        chat.messages += [question, Message(role="assistant", content="gone")]
    chat.messages.append(question)

    chat.fold("nothing")
    assert chat.messages == [
        Message(role="system", content="S"),
        Message(role="user", content=expected),
    ]


def test_a_fold_keeps_every_user_message_before_the_first_reply() -> None:
    chat = unplayed_session().chat("a")
    chat.messages += [
        Message(role="user", content="in folder src"),
        Message(role="user", content="go"),
        Message(role="assistant", content="gone"),
        Message(role="user", content="on"),
    ]
    chat.fold("moved")
    assert chat.messages == [
        Message(role="system", content="S"),
        Message(
            role="user", content="in folder src\n\ngo\n\nWhat has happened since:\nmoved\n\non"
        ),
    ]


def test_a_summary_before_the_first_reply_is_replaced_too() -> None:
    chat = unplayed_session().chat("a")
    chat.messages.append(Message(role="user", content="go"))
    chat.fold("first summary")
    chat.messages.append(Message(role="assistant", content="gone"))
    chat.fold("second summary")
    assert chat.messages == [
        Message(role="system", content="S"),
        Message(role="user", content="go\n\nWhat has happened since:\nsecond summary"),
    ]


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_later_summary_replaces_the_earlier_one(taken_over: bool) -> None:
    session = unplayed_session()
    chat = session.chat("a")
    chat.messages += [
        Message(role="user", content="go"),
        Message(role="assistant", content="gone"),
        Message(role="tool", content="first result"),
    ]
    chat.fold("first summary")
    assert chat.messages[1].content == (
        "go\n\nWhat has happened since:\nfirst summary\n\nfirst result"
    )

    if taken_over:
        earlier_chat = chat
        chat = session.chat("a")
        chat.take_over(earlier_chat)
    chat.messages += [
        Message(role="assistant", content="gone again"),
        Message(role="tool", content="second result"),
    ]
    chat.fold("second summary")
    assert chat.messages == [
        Message(role="system", content="S"),
        Message(
            role="user", content="go\n\nWhat has happened since:\nsecond summary\n\nsecond result"
        ),
    ]


def test_a_fold_drops_calls_without_a_result(qwen: Renderer) -> None:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        await chat.say("go")
        chat.fold("it called f")
        await chat.say("go on")
        await env.step("1")

    trajectory, _ = play(qwen, orchestra, call("f"), "ok")
    assert trajectory.error == ""
    messages = [(message.role, message.content) for message in trajectory.turns[1].messages]
    assert messages == [
        ("system", "S"),
        ("user", "go\n\nWhat has happened since:\nit called f"),
        ("user", "go on"),
    ]


def test_dropped_results_are_replaced_by_a_note(qwen: Renderer) -> None:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chat = team.chat("a")
        reply = await chat.say("go")
        for size in (200, 210, 220):
            reply = await chat.tool(reply.calls[0].id, "r" * size)
        await env.step("1")

    rules = ChatRules(when_full="drop_oldest_results")
    replies = [call("f"), call("f"), call("f"), "1"]
    free, _ = play(qwen, orchestra, *replies, rules=rules)
    short = len(free.turns[-1].prompt_ids) + 399  # one token less than prompt and reply need
    trajectory, _ = play(qwen, orchestra, *replies, rules=rules, max_length=short)
    last = trajectory.turns[3]
    results = [message.content for message in last.messages if message.role == "tool"]
    assert results == ["[This result was dropped to save space.]"] * 2 + ["r" * 220]
    assert (last.index, last.scores["dropped_results"], last.scores["root"]) == (3, 2.0, 1.0)
    assert last.seed == free.turns[3].seed
    assert chat_metrics(trajectory, "dropped_results", "roots") == [2.0, 1.0]


def test_a_chat_whose_first_prompt_is_too_long_is_overlong(qwen: Renderer) -> None:
    trajectory, _ = play(qwen, one_chat, max_length=451)
    assert (trajectory.status, trajectory.metrics) == (Status.FAILED, {"overlong": 1.0})
    assert trajectory.error.startswith("PromptTooLong: a (turn 0): chat a/0: prompt of ")


def test_long_chats_are_rendered_concurrently_off_the_event_loop(qwen: Renderer) -> None:
    on_main_thread: list[bool] = []
    extend = qwen.extend

    def extend_and_record(*arguments: Any) -> tuple[int, ...] | None:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        return extend(*arguments)

    qwen.extend = extend_and_record  # type: ignore[method-assign]

    async def orchestra(task: Any, team: Any, env: Any) -> None:
        chats = [team.chat("a", tools=()) for _ in range(8)]
        for question in ("short", "x" * 30_000):
            await asyncio.gather(*(chat.say(question) for chat in chats))
        await env.step("1")

    trajectory, _ = play(qwen, orchestra, *["ok"] * 16)
    assert trajectory.error == ""
    assert on_main_thread == [False] * 8
    for turn in trajectory.turns[8:]:
        first = trajectory.turns[turn.index - 8]
        assert (
            turn.prompt_ids[: len(first.prompt_ids) + 3] == first.prompt_ids + first.completion_ids
        )
        assert len(turn.prompt_ids) > 30_000


def test_a_chat_with_many_tools_is_rendered_off_the_event_loop(qwen: Renderer) -> None:
    on_main_thread: list[bool] = []
    next_prompt = qwen.next_prompt

    def render_and_record(*arguments: Any) -> Any:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        return next_prompt(*arguments)

    qwen.next_prompt = render_and_record  # type: ignore[method-assign]

    async def orchestra(task: Any, team: Any, env: Any) -> None:
        (tool,) = team.tools["a"]
        for count in (1, 9):
            tools = [replace(tool, schema=replace(tool.schema, name=f"t{n}")) for n in range(count)]
            await team.chat("a", tools=tools).say("short")
        await env.step("1")

    trajectory, _ = play(qwen, orchestra, "ok", "ok")
    assert trajectory.error == ""
    assert on_main_thread == [True, False]


def test_branches_of_a_chat_have_separate_tools(qwen: Renderer) -> None:
    async def orchestra(task: Any, team: Any, env: Any) -> None:
        await answer(team.chat("a"), env, "one?")

    def reply_to(prompt: str) -> str:
        return "8" if "now" in prompt else call("count_on", '{"by": 2}')

    trajectory, _ = play(qwen, orchestra, reply_to=reply_to, tree=Branching(width=2))
    assert trajectory.error == ""
    assert [(turn.node, turn.text) for turn in trajectory.turns][-2:] == [
        ("0.0", "8"),
        ("0.1", "8"),
    ]
    assert trajectory.leaf == "0.0"
    # each branch has a counter of its own
    assert {event.result for event in trajectory.tools} == {"now 2"}
    first, second = trajectory.path
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled


@pytest.mark.parametrize(("arguments", "roots"), [({}, 0), ({"enable_thinking": False}, 3)])
def test_qwen3_without_thinking_is_tokenized_anew_at_every_turn(
    arguments: dict[str, Any], roots: int, tmp_path: Path
) -> None:
    """The prompts end with an empty thought, which the history leaves out.

    To continue from the token ids would show the model a history that its template never writes.
    """

    async def four(task: Any, team: Any, env: Any) -> None:
        await answer(team.chat("a"), env, "one?", "two?", "three?", "four?")

    renderer = renderer_of("qwen3", tmp_path, **arguments)
    trajectory, _ = play(renderer, four, "1", "2", "3", "4")
    assert [turn.scores.get("root", 0.0) for turn in trajectory.turns] == [0.0] + [
        1.0 if roots else 0.0
    ] * 3
    empty = renderer.encode("<think>\n\n</think>\n\n") if arguments else ()
    # all but the latest reply is still one path
    for previous, turn in pairwise(trajectory.turns):
        shared = previous.prompt_ids[: len(previous.prompt_ids) - len(empty)]
        assert turn.prompt_ids[: len(shared)] == shared
    rewarded = replace(
        trajectory, turns=tuple(replace(turn, reward=1.0) for turn in trajectory.turns)
    )
    samples = to_samples([Group(task=TASK, trajectories=(rewarded,))])
    (batch,) = pack(
        [replace(s, advantages=(1.0,) * len(s.completion_ids)) for s in samples], 10_000
    )
    last = trajectory.turns[-1]
    repeated = (
        sum(len(empty) + len(turn.completion_ids) - 1 for turn in trajectory.turns[:-1])
        if roots
        else 0
    )
    # all tokens of the last turn but its end, and each earlier reply behind its empty thought
    assert len(batch.token_ids) == len(last.prompt_ids) + len(last.completion_ids) - 1 + repeated
