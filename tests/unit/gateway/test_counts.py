"""Counting the tokens of a prompt with Anthropic's `count_tokens`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway import open_session, scripted_team

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_a_count_equals_the_calls_prompt_tokens_and_changes_nothing(tmp_path: Path) -> None:
    team, engine = scripted_team(tmp_path, lambda prompt, n: f"<think>\nhm\n</think>\n\nreply {n}")

    async def run() -> None:
        async with (
            open_session(team) as (url, key, team_session, _),
            httpx.AsyncClient(base_url=url, trust_env=False) as api,
        ):

            async def post(path: str, body: dict[str, Any], token: str = key) -> Any:
                return await api.post(path, json=body, headers={"x-api-key": token})

            chat: list[Any] = [{"role": "user", "content": "40 + 2?"}]
            call = {"model": "a", "messages": chat, "system": "S", "tools": [TOOL]}
            for turn in range(3):
                counted = (await post("/v1/messages/count_tokens", call)).json()
                assert len(engine.calls) == len(team_session.turns) == turn
                reply = (await post("/v1/messages", call | {"max_tokens": 99})).json()
                assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
                assert counted["input_tokens"] == len(team_session.turns[-1].prompt_ids)
                chat += [
                    {"role": "assistant", "content": reply["content"]},
                    {"role": "user", "content": "sure?"},
                ]
            assert {turn.chat for turn in team_session.turns} == {"a/0"}
            refusals = [
                (
                    await post("/v1/messages/count_tokens", call, "sk-no"),
                    401,
                    "authentication_error",
                ),
                (
                    await post("/v1/messages/count_tokens", call | {"model": "z"}),
                    404,
                    "not_found_error",
                ),
                (
                    await post("/v1/messages/count_tokens", {"model": "a"}),
                    400,
                    "invalid_request_error",
                ),
                (
                    await post("/v1/messages/count_tokens", call | {"max_tokens": 0}),
                    400,
                    "invalid_request_error",
                ),
                (
                    await post("/v1/messages/count_tokens", call | {"messages": chat[:2]}),
                    400,
                    "invalid_request_error",
                ),
            ]
            for refusal, status, kind in refusals:
                assert (refusal.status_code, refusal.json()["error"]["type"]) == (status, kind)
            named = await post("/a/b/v1/messages/count_tokens", call)
            assert named.json()["input_tokens"] > 0

    asyncio.run(run())


def test_the_order_of_tool_results_does_not_change_a_count(tmp_path: Path) -> None:
    """A conversation whose results stand in another order continues from its latest reply."""
    thought = "<think>\nhm\n</think>\n\n"
    tool_call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    replies = [f"{thought}{tool_call}{tool_call}", f"{thought}  42", "Yes."]
    team, _ = scripted_team(tmp_path, lambda prompt, n: replies[n])

    async def run() -> None:
        async with (
            open_session(team) as (url, key, team_session, _),
            httpx.AsyncClient(
                base_url=url, headers={"x-api-key": key}, trust_env=False, timeout=60
            ) as api,
        ):
            chat: list[Any] = [{"role": "user", "content": "40 + 2?"}]
            call = {"model": "a", "messages": chat, "tools": [TOOL], "max_tokens": 900}

            async def reply_blocks() -> list[dict[str, Any]]:
                """Return the blocks of the next reply, whose prompt must be as long as its count."""
                counted = (await api.post("/v1/messages/count_tokens", json=call)).json()
                reply = (await api.post("/v1/messages", json=call)).json()
                assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
                chat.append({"role": "assistant", "content": reply["content"]})
                return list(reply["content"])

            blocks = await reply_blocks()
            ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call_id, "content": call_id}
                for call_id in reversed(ids)
            ]
            chat.append({"role": "user", "content": results})
            await reply_blocks()
            chat.append({"role": "user", "content": "sure?"})
            await reply_blocks()
            assert {turn.chat for turn in team_session.turns} == {"a/0"}
            assert not any("root" in turn.scores for turn in team_session.turns)

    asyncio.run(run())
