"""Counting the tokens of a prompt before it is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway import opened, scripted

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_a_count_is_what_the_same_call_reads_and_changes_nothing(tmp_path: Path) -> None:
    team, engine = scripted(tmp_path, lambda prompt, n: f"<think>\nhm\n</think>\n\nreply {n}")

    async def run() -> None:
        async with (
            opened(team) as (url, key, seat, _),
            httpx.AsyncClient(base_url=url, trust_env=False) as api,
        ):

            async def post(path: str, body: dict[str, Any], token: str = key) -> Any:
                return await api.post(path, json=body, headers={"x-api-key": token})

            chat: list[Any] = [{"role": "user", "content": "40 + 2?"}]
            asked = {"model": "a", "messages": chat, "system": "S", "tools": [TOOL]}
            for turn in range(3):
                counted = (await post("/v1/messages/count_tokens", asked)).json()
                assert len(engine.calls) == len(seat.turns) == turn
                said = (await post("/v1/messages", asked | {"max_tokens": 99})).json()
                assert counted == {"input_tokens": said["usage"]["input_tokens"]}
                assert counted["input_tokens"] == len(seat.turns[-1].prompt_ids)
                chat += [
                    {"role": "assistant", "content": said["content"]},
                    {"role": "user", "content": "sure?"},
                ]
            assert {turn.chat for turn in seat.turns} == {"a/0"}
            wrong = [
                (
                    await post("/v1/messages/count_tokens", asked, "sk-no"),
                    401,
                    "authentication_error",
                ),
                (
                    await post("/v1/messages/count_tokens", asked | {"model": "z"}),
                    404,
                    "not_found_error",
                ),
                (
                    await post("/v1/messages/count_tokens", {"model": "a"}),
                    400,
                    "invalid_request_error",
                ),
                (
                    await post("/v1/messages/count_tokens", asked | {"max_tokens": 0}),
                    400,
                    "invalid_request_error",
                ),
                (
                    await post("/v1/messages/count_tokens", asked | {"messages": chat[:2]}),
                    400,
                    "invalid_request_error",
                ),
            ]
            for reply, status, kind in wrong:
                assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
            named = await post("/a/b/v1/messages/count_tokens", asked)
            assert named.json()["input_tokens"] > 0

    asyncio.run(run())
