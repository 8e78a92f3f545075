"""What a prompt counts before it is asked, and how many connections may be open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from rollout.base.http_server import bind, server_config, url_of
from rollout.gateway.app import Entrance, gateway_app
from rollout.gateway.dialects import GatewayError
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


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", "error"), ("/v1/chat/completions", None)]
)
def test_calls_of_a_connection_too_many_are_refused_in_their_dialect(
    path: str, kind: str | None
) -> None:
    def find(_: object) -> Any:
        raise GatewayError(401, "nobody is known here")

    async def status(body: bytes) -> tuple[int, Any]:
        async with httpx.AsyncClient(trust_env=False) as api:
            reply = await api.post(url + path, content=body)
        return reply.status_code, reply

    async def run() -> None:
        config = server_config(
            gateway_app(Entrance(find, 9), ""), drain_s=1, lifespan=False, most=2
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        held = [await asyncio.open_connection(*listener.getsockname()) for _ in range(2)]
        code, reply = await status(
            b"x" * (4 << 20)
        )  # its body is not read, and it hears all the same
        assert (code, reply.headers["retry-after"], reply.headers["connection"]) == (
            429,
            "1",
            "close",
        )
        assert reply.json().get("type") == kind
        assert (
            reply.json()["error"]["message"] == "2 connections are open, which is as many as may be"
        )
        assert reply.json()["error"]["type"] == "rate_limit_error"
        held.pop()[1].close()
        await asyncio.sleep(0.1)
        assert (await status(b"{}"))[0] == 401  # there is room again
        held.pop()[1].close()
        server.should_exit = True
        await serving

    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    asyncio.run(run())
