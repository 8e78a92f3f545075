"""A conversation with a tool in all three APIs, with the vendors' clients: the same tokens in each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollout.records.trajectory import Turn
from tests.support.gateway import open_session, recording_team, sampling_team, scripted_team

CALL = '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
REPLIES = [f"<think>\nhm\n</think>\n\nLet me see.{CALL}", "It is 42.", "Yes."]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add."}
Program = Callable[[Any, Any, bool], Awaitable[list[Any]]]


async def completions(api: openai.AsyncOpenAI, _: Any, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", "function": {**ADD, "parameters": PARAMETERS}}]
    chat: list[Any] = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": "40 + 2?"},
    ]

    async def ask() -> Any:
        if not stream:
            return (
                (await api.chat.completions.create(model="a", messages=chat, tools=tools))
                .choices[0]
                .message
            )
        async with api.chat.completions.stream(model="a", messages=chat, tools=tools) as events:
            return (await events.get_final_completion()).choices[0].message

    first = await ask()
    chat += [first.model_dump(exclude_none=True, exclude={"reasoning_content"})]
    chat += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}]
    second = await ask()
    chat += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "sure?"}]
    third = await ask()
    call = first.tool_calls[0].function
    return [first.content, call.name, json.loads(call.arguments), second.content, third.content]


async def responses(api: openai.AsyncOpenAI, _: Any, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", **ADD, "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "40 + 2?"}]

    async def ask(**more: Any) -> Any:
        settings: Any = {"model": "a", "instructions": "S", "tools": tools, "input": items, **more}
        if not stream:
            return await api.responses.create(**settings)
        async with api.responses.stream(**settings) as events:
            return await events.get_final_response()

    first = await ask()
    items += [item.model_dump(exclude_none=True) for item in first.output]
    call = next(item for item in first.output if item.type == "function_call")
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    second = await ask()
    third = await ask(input="sure?", previous_response_id=second.id)
    return [
        first.output_text,
        call.name,
        json.loads(call.arguments),
        second.output_text,
        third.output_text,
    ]


async def messages(_: Any, api: anthropic.AsyncAnthropic, stream: bool) -> list[Any]:
    tools: Any = [{**ADD, "input_schema": PARAMETERS}]
    chat: list[Any] = [{"role": "user", "content": "40 + 2?"}]

    async def ask() -> Any:
        settings: Any = {
            "model": "a",
            "max_tokens": 900,
            "system": "S",
            "messages": chat,
            "tools": tools,
        }
        if not stream:
            return await api.messages.create(**settings)
        async with api.messages.stream(**settings) as events:
            return await events.get_final_message()

    first = await ask()
    assert first.stop_reason == "tool_use"
    chat += [
        {
            "role": "assistant",
            "content": [block.model_dump(exclude_none=True) for block in first.content],
        }
    ]
    text, use = first.content[-2:]
    chat += [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "42"}],
        }
    ]
    second = await ask()
    chat += [
        {"role": "assistant", "content": second.content[0].text},
        {"role": "user", "content": "sure?"},
    ]
    third = await ask()
    assert third.usage.output_tokens == len("Yes.") + 1
    return [text.text, use.name, use.input, second.content[0].text, third.content[0].text]


PROGRAMS: dict[str, Program] = {
    "completions": completions,
    "responses": responses,
    "messages": messages,
}


def play(
    folder: Path, program: Program, stream: bool, replies: Sequence[str] = REPLIES
) -> tuple[list[Any], tuple[Turn, ...]]:
    team, _ = scripted_team(folder, lambda prompt, n: replies[n])

    async def run() -> Any:
        async with (
            open_session(team) as (url, key, team_session, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as anthropic_client,
        ):
            return await program(openai_client, anthropic_client, stream), team_session.turns

    return asyncio.run(run())  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_all_dialects_play_the_same_conversation(tmp_path: Path, stream: bool) -> None:
    played = {name: play(tmp_path / name, program, stream) for name, program in PROGRAMS.items()}
    ids = set()
    for result, turns in played.values():
        assert result == ["Let me see.", "add", {"a": 40, "b": 2}, "It is 42.", "Yes."]
        assert [turn.chat for turn in turns] == ["a/0"] * 3
        assert not any("root" in turn.scores for turn in turns)
        assert [m.role for m in turns[2].messages] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
        ]
        ids.add((turns[2].prompt_ids, turns[2].completion_ids))
    assert len(ids) == 1  # equal prompts and equal completions


def test_every_dialect_continues_from_an_empty_reply(tmp_path: Path) -> None:
    """The conversation begins with a system message alone."""

    async def completions(openai_client: openai.AsyncOpenAI, _: Any) -> None:
        chat: list[Any] = [{"role": "system", "content": "q"}]
        reply = (
            (await openai_client.chat.completions.create(model="a", messages=chat))
            .choices[0]
            .message
        )
        chat += [reply.model_dump(exclude_none=True), {"role": "user", "content": "r"}]
        await openai_client.chat.completions.create(model="a", messages=chat)

    async def responses(openai_client: openai.AsyncOpenAI, _: Any) -> None:
        items: list[Any] = [{"role": "system", "content": "q"}]
        reply = await openai_client.responses.create(model="a", input=items)
        items += [
            *(item.model_dump(exclude_none=True) for item in reply.output),
            {"role": "user", "content": "r"},
        ]
        await openai_client.responses.create(model="a", input=items)

    async def messages(_: Any, anthropic_client: anthropic.AsyncAnthropic) -> None:
        ask: Any = partial(anthropic_client.messages.create, model="a", max_tokens=900)
        chat: list[Any] = [{"role": "system", "content": "q"}]
        reply = await ask(messages=chat)
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        await ask(
            messages=[
                *chat,
                {"role": "assistant", "content": content},
                {"role": "user", "content": "r"},
            ]
        )

    for number, program in enumerate((completions, responses, messages)):

        async def both(
            openai_client: Any, anthropic_client: Any, _: bool, program: Any = program
        ) -> list[Any]:
            await program(openai_client, anthropic_client)
            return []

        _, (first, second) = play(tmp_path / str(number), both, False, ["", "ok"])
        sampled = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(sampled)] == sampled
        assert [turn.chat for turn in (first, second)] == ["a/0", "a/0"]


def test_anthropics_client_tools_need_no_schema(tmp_path: Path) -> None:
    team, prompts = recording_team(tmp_path, lambda prompt, n: "ok")
    hi: Any = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

    async def run() -> None:
        async with (
            open_session(team) as (url, key, _, _),
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as api,
        ):
            await api.beta.messages.create(
                **hi, tools=[{"type": "memory_20250818", "name": "memory"}]
            )
            with pytest.raises(anthropic.BadRequestError, match="a tool has no name"):
                await api.messages.create(**hi, tools=[{"type": "custom"}])  # type: ignore[list-item]

    asyncio.run(run())
    assert len(prompts) == 1 and '"name": "memory"' in prompts[0]


def test_both_vendors_clients_find_the_models(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "ok")

    async def run(aliases: dict[str, str]) -> list[Any]:
        async with (
            open_session(team, aliases=aliases) as (url, key, team_session, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as anthropic_client,
        ):
            openai_model = await openai_client.models.retrieve("a")
            anthropic_model = await anthropic_client.models.retrieve("b")
            assert (
                openai_model.id,
                openai_model.object,
                anthropic_model.id,
                anthropic_model.type,
            ) == (
                "a",
                "model",
                "b",
                "model",
            )
            assert [model.id async for model in anthropic_client.models.list()] == ["a", "b"]
            answers: list[Any] = []
            for api in (openai_client, anthropic_client):
                try:
                    answers.append((await api.models.retrieve("maker/gpt-9")).id)
                except (openai.NotFoundError, anthropic.NotFoundError) as error:
                    answers.append(error.body)
            assert team_session.turns == ()
            return answers

    message = "there is no model 'maker/gpt-9'; agents of this session: a, b"
    assert asyncio.run(run({})) == [
        {"message": message, "type": "not_found_error", "param": None, "code": "model_not_found"},
        {
            "type": "error",
            "error": {"type": "not_found_error", "message": message},
            "request_id": None,
        },
    ]
    assert asyncio.run(run({"*": "a"})) == ["maker/gpt-9"] * 2


async def errors_of_invalid_calls(url: str, key: str) -> list[tuple[int, str]]:
    """Make invalid calls in two APIs; return the status and the type of each error."""
    long = "x" * 999
    hi: Any = [{"role": "user", "content": "hi"}]
    long_message: Any = [{"role": "user", "content": long}]
    reference: Any = [{"type": "item_reference", "id": "1"}]
    errors = []
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as anthropic_client,
    ):
        respond: Any = openai_client.responses.create
        for arguments in (
            {"model": "nobody", "input": "hi"},
            {"model": "a", "input": reference},
            {"model": "a", "input": long},
            {"model": "a", "input": "hi", "previous_response_id": "resp_9"},
        ):
            with pytest.raises(openai.APIStatusError) as refusal:
                await respond(**arguments)
            body: Any = refusal.value.body
            errors.append((refusal.value.status_code, body["type"]))

        create: Any = anthropic_client.messages.create
        for arguments in (
            {"model": "nobody", "max_tokens": 5, "messages": hi},
            {"model": "a", "max_tokens": 0, "messages": hi},
            {"model": "a", "max_tokens": 5, "messages": long_message},
        ):
            with pytest.raises(anthropic.APIStatusError) as refused:
                await create(**arguments)
            body = refused.value.body
            errors.append((refused.value.status_code, body["error"]["type"]))
    return errors


def test_errors_have_each_dialects_shape(tmp_path: Path) -> None:
    """The errors of a wrong model, a wrong key, an invalid request and a prompt that is too long."""
    team, _, _ = sampling_team(tmp_path, max_length=256)

    async def run() -> list[tuple[int, str]]:
        async with open_session(team) as (url, key, _, _):
            errors = await errors_of_invalid_calls(url, key)
            return errors + await errors_of_invalid_calls(url, "sk-wrong")

    bad_request = (400, "invalid_request_error")
    missing = (404, "not_found_error")
    wrong_key = (401, "authentication_error")
    assert asyncio.run(run()) == [
        missing,
        bad_request,
        bad_request,
        missing,
        missing,
        bad_request,
        bad_request,
        *[wrong_key] * 7,
    ]
