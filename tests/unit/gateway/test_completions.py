"""Chat Completions through the gateway with OpenAI's client: tokens, tools, streams, errors and retries."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rollout.gateway.app import Gateway
from rollout.gateway.calls import GatewayCall
from rollout.gateway.sessions import GatewaySession
from rollout.rewards.penalties import mask_truncated
from rollout.teams.team import Team
from tests.support.gateway import open_session, sampling_team, scripted_team

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1.0}}</tool_call>'


def client(url: str, key: str, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **settings)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def play(team: Team, program: Any, **settings: Any) -> Any:
    """Run a program with OpenAI's client; return its result and the recorded turns."""

    async def run() -> Any:
        async with (
            open_session(team, **settings) as (url, key, team_session, session),
            client(url, key) as api,
        ):
            result = await program(api)
            await session.close()
            return result, team_session.turns

    return asyncio.run(run())


def test_a_call_is_a_turn_of_the_agent_that_it_names(tmp_path: Path) -> None:
    team, engine = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")

    async def program(api: AsyncOpenAI) -> Any:
        assert sorted([model.id async for model in api.models.list()]) == ["a", "b"]
        return await api.chat.completions.create(
            model="b", messages=[{"role": "system", "content": "S"}, user("hi")], temperature=2
        )

    reply, (turn,) = play(team, program)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("reply 0", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        len(turn.prompt_ids),
        len("reply 0") + 1,
    )
    assert (turn.agent, turn.policy, turn.text, turn.chat) == ("b", "p", "reply 0", "b/0")
    assert [(m.role, m.content) for m in turn.messages] == [("system", "S"), ("user", "hi")]
    assert engine.calls[0][1].temperature == turn.temperature == 0.8  # the agent's, not the call's


def test_a_call_that_continues_a_chat_goes_on_from_its_tokens(tmp_path: Path) -> None:
    """The program repeats two tool calls with other ids and other JSON, and without the thoughts."""
    replies = [f"<think>\nhm\n</think>\n\nlook {CALL}{CALL}", "  both  ", "end"]
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])

    async def program(api: AsyncOpenAI) -> None:
        chat: list[Any] = [user("one?")]
        ask: Any = api.chat.completions.create
        first = (await ask(model="a", messages=chat, tools=[TOOL])).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", "look")
        assert first.message.reasoning_content == "hm"
        assert [call.id for call in first.message.tool_calls] == ["call_0_0", "call_0_1"]
        assert json.loads(first.message.tool_calls[0].function.arguments) == {"a": 1}
        function = {"name": "add", "arguments": '{ "a":1 }'}
        chat += [
            {
                "role": "assistant",
                "content": " look\n",
                "tool_calls": [
                    {"id": f"x{n}", "type": "function", "function": function} for n in (1, 2)
                ],
            },
            {"role": "tool", "tool_call_id": "x2", "content": "4"},
            {"role": "tool", "tool_call_id": "x1", "content": "3"},
        ]
        second = (await ask(model="a", messages=chat, tools=[TOOL])).choices[0].message
        assert second.content == "both"
        await ask(
            model="a",
            messages=[*chat, {"role": "assistant", "content": "both"}, user("?")],
            tools=[TOOL],
        )

    _, turns = play(team, program)
    before: tuple[int, ...] = ()
    for turn in turns:
        assert turn.prompt_ids[: len(before)] == before
        assert turn.chat == "a/0" and "root" not in turn.scores
        before = turn.prompt_ids + turn.completion_ids
    results = [(message.answers, message.content) for message in turns[1].messages[2:]]
    assert results == [("0.0", "3"), ("0.1", "4")]  # in the order of the calls
    assert turns[0].scores["tool_calls"] == 2.0


def test_a_rewritten_conversation_is_a_root(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"r{n}")

    async def program(api: AsyncOpenAI) -> None:
        ask: Any = api.chat.completions.create
        chat: list[Any] = [user("q")]
        await ask(model="a", messages=chat)
        chat += [{"role": "assistant", "content": "r0"}, user("and?")]
        await ask(model="a", messages=chat)
        await ask(model="a", messages=chat)  # an equal call: another sample, a branch of the chat
        await ask(model="a", messages=[*chat, {"role": "assistant", "content": "other"}, user("?")])
        await ask(
            model="a",
            messages=[user("new"), {"role": "assistant", "content": "never said"}, user("?")],
        )
        await ask(model="a", messages=chat, tools=[TOOL])  # other tools are another prompt

    _, turns = play(team, program)
    assert [turn.chat for turn in turns] == ["a/0", "a/0", "a/1", "a/2", "a/3", "a/4"]
    assert [turn.scores.get("root", 0.0) for turn in turns] == [0, 0, 0, 1, 1, 1]
    start = turns[0].prompt_ids + turns[0].completion_ids
    assert all(turn.prompt_ids[: len(start)] == start for turn in turns[1:4])


def test_a_stream_has_the_text_the_calls_and_the_usage_of_the_reply(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"{'long ' * 20}{CALL}")

    async def program(api: AsyncOpenAI) -> Any:
        text = ""
        arguments = ""
        names = []
        finish = None
        usage = None
        stream = await api.chat.completions.create(
            model="a",
            messages=[user("q")],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or []:
                    if call.function.name:
                        names.append(call.function.name)
                    arguments += call.function.arguments or ""
        return text, json.loads(arguments), finish, usage.completion_tokens, names

    result, (turn,) = play(team, program)
    assert result == (
        ("long " * 20).strip(),
        {"a": 1},
        "tool_calls",
        len(turn.completion_ids),
        ["add"],
    )


def test_a_stop_ends_the_turn_and_the_program_gets_the_text_before_it(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "Thought\nObservation: made up")

    async def program(api: AsyncOpenAI) -> Any:
        ask: Any = api.chat.completions.create
        reply = await ask(model="a", messages=[user("q")], stop=["Observation:"])
        text = reply.choices[0].message.content
        await ask(
            model="a", messages=[user("q"), {"role": "assistant", "content": text}, user("4")]
        )
        return reply

    reply, turns = play(team, program)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
        "Thought\n",
        "stop",
    )
    assert (
        reply.usage.completion_tokens
        == len(turns[0].completion_ids)
        == len("Thought\nObservation:")
    )
    assert (turns[0].text, turns[0].finish_reason, turns[0].valid) == (
        "Thought\nObservation:",
        "stop",
        True,
    )
    # The turn is not truncated: it trains, including its stop.
    assert mask_truncated(turns[0]) == 0.0
    assert turns[1].scores["root"] == 1.0
    assert [message.content for message in turns[1].messages] == ["q", "Thought\n", "4"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            {"model": "nobody"},
            openai.NotFoundError,
            "there is no model 'nobody'; agents of this session: a, b",
        ),
        ({"messages": []}, openai.BadRequestError, "messages"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            openai.BadRequestError,
            "the last message must be of the user",
        ),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            openai.BadRequestError,
            "messages.0.role",
        ),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"n": 2, "stream": True}, openai.BadRequestError, "n: a stream has one choice"),
        (
            {"functions": [{"name": "f", "parameters": {}}]},
            openai.BadRequestError,
            "functions: this older field is not read; send them as `tools`",
        ),
        (
            {"messages": [{"role": "system", "content": ""}]},
            openai.BadRequestError,
            "the last message must be of the user",
        ),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        (
            {"response_format": {"type": "yaml"}},
            openai.BadRequestError,
            "response_format.type",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "number", "minimum": "3"}},
                }
            },
            openai.BadRequestError,
            "the schema of the reply's format is invalid: minimum: '3' is not of type 'number'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            openai.BadRequestError,
            "image_url",
        ),
        ({"messages": [user("x" * 4000)]}, openai.BadRequestError, "there is room for"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "function": {"name": "f", "arguments": "[" * 9999},
                            }
                        ],
                    },
                    user("x"),
                ]
            },
            openai.BadRequestError,
            "not a JSON object",
        ),
    ],
)
def test_invalid_calls_are_refused_with_a_message(
    tmp_path: Path, call: dict[str, Any], error: type[openai.APIStatusError], message: str
) -> None:
    team, _, _ = sampling_team(tmp_path, max_length=512)

    async def program(api: AsyncOpenAI) -> None:
        with pytest.raises(error) as caught:
            await api.chat.completions.create(**{"model": "a", "messages": [user("hi")], **call})
        assert message in str(caught.value)
        assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]

    _, turns = play(team, program)
    assert turns == ()


def test_keys_paths_bodies_and_the_number_of_calls_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.gateway.app.MAX_CALL_BYTES", 1000)
    team, _ = scripted_team(tmp_path, lambda prompt, n: "x")

    async def run() -> list[int]:
        async with (
            open_session(team, max_turns=1) as (url, key, _, _),
            httpx.AsyncClient(trust_env=False) as http,
        ):

            async def post(address: str, body: bytes, key: str = key) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                response = await http.post(address, content=body, headers=headers)
                return response.status_code

            address = f"{url}/v1/chat/completions"
            body = json.dumps({"model": "z", "messages": [user("q")]}).encode()
            return [
                await post(address, body, key="sk-other"),
                await post(address.replace("/s/", "/s/x"), body),
                await post(f"{url}/v1/nowhere", body),
                await post(address, b"{"),
                await post(address, b"\xff\xfe"),
                await post(address, b"[" * 900),
                await post(address, body * 20),
                await post(address, body),
                await post(f"{url}/a/b/v1/chat/completions", body),  # the URL names the agent
                await post(f"{url}/a/b/v1/chat/completions", body),
            ]

    assert asyncio.run(run()) == [401, 401, 404, 400, 400, 400, 413, 404, 200, 403]


def test_the_error_for_an_unknown_path_names_the_paths_of_the_gateway(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "x")

    async def run() -> httpx.Response:
        async with (
            open_session(team) as (url, _, _, _),
            httpx.AsyncClient(trust_env=False) as http,
        ):
            return await http.get(f"{url}/v1/model")

    response = asyncio.run(run())
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message.endswith(
        "paths of the gateway: /v1/chat/completions, /v1/responses, /v1/messages, "
        "/v1/messages/count_tokens, /v1/embeddings, /v1/models"
    )


def test_an_unread_reply_is_returned_to_an_equal_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that leaves and repeats its call gets the first reply; a reply that stays unread is masked."""
    team, engine, _ = sampling_team(tmp_path, max_tokens=60)
    begun = asyncio.Semaphore(0)
    left = asyncio.Semaphore(0)
    may_reply = asyncio.Event()
    generate = engine.generate
    abandon = GatewaySession.abandon

    async def generate_later(*arguments: Any) -> Any:
        begun.release()
        await may_reply.wait()
        return await generate(*arguments)

    def abandon_and_release(session: GatewaySession, call: GatewayCall) -> None:
        abandon(session, call)
        left.release()

    monkeypatch.setattr(engine, "generate", generate_later)
    monkeypatch.setattr(GatewaySession, "abandon", abandon_and_release)

    async def program(api: AsyncOpenAI) -> Any:
        ask: Any = api.chat.completions.create
        for question in ("retried", "left"):
            asking = asyncio.create_task(ask(model="a", messages=[user(question)]))
            await begun.acquire()
            asking.cancel()
            await left.acquire()
        may_reply.set()
        again = await ask(model="a", messages=[user("retried")])
        # The first reply was read, so this is another sample.
        other = await ask(model="a", messages=[user("retried")])
        return again, other

    (again, other), turns = play(team, program)
    assert [turn.messages[0].content for turn in turns] == ["retried", "left", "retried"]
    assert [(turn.masked, turn.scores.get("unread")) for turn in turns] == [
        (False, None),
        (True, 1.0),
        (False, None),
    ]
    assert again.id.endswith("_0") and other.id.endswith("_2")
    assert engine.core.stats.decode_tokens + 3 >= sum(len(turn.completion_ids) for turn in turns)


def test_a_retry_gets_the_earlier_reply_only_if_the_call_was_made_once(
    tmp_path: Path,
) -> None:
    """A retry of a call that was made twice is a new sample: nobody knows which answer was lost."""
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")

    async def program(api: AsyncOpenAI) -> list[str]:
        async def ask(question: str, retry: int = 0) -> str:
            call: Any = {
                "messages": [user(question)],
                "extra_headers": {"x-stainless-retry-count": str(retry)},
            }
            completion = await api.chat.completions.create(model="a", **call)
            return str(completion.choices[0].message.content)

        once = [await ask("once"), await ask("once", 1), await ask("once", 2)]
        return [*once, await ask("twice"), await ask("twice"), await ask("twice", 1)]

    texts, turns = play(team, program)
    assert texts == ["reply 0"] * 3 + ["reply 1", "reply 2", "reply 3"]
    assert [turn.text for turn in turns] == ["reply 0", "reply 1", "reply 2", "reply 3"]


def test_a_retry_of_a_refused_call_is_a_new_sample(tmp_path: Path) -> None:
    team, engine = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")
    team_session = team.session(1, 2, "t", 0)
    may_reply = asyncio.Event()
    generate = engine.generate

    async def generate_later(*arguments: Any) -> Any:
        await may_reply.wait()
        return await generate(*arguments)

    engine.generate = generate_later  # type: ignore[method-assign]

    async def run() -> set[str]:
        gateway = Gateway(max_calls=1)
        async with (
            gateway.running(),
            gateway.serve_session(GatewaySession(team_session)) as (url, key),
            client(url, key).with_options(max_retries=3) as api,
        ):
            ask: Any = partial(api.chat.completions.create, model="a", messages=[user("q")])
            asking = [asyncio.create_task(ask()) for _ in range(2)]
            await asyncio.sleep(0.3)  # one of them is refused; its client retries after a second
            may_reply.set()
            return {(await task).choices[0].message.content for task in asking}

    assert asyncio.run(run()) == {"reply 0", "reply 1"}
