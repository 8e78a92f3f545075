"""Sessions of a gateway for a team of the agents `a` and `b`, on scripted replies or on a tiny model of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.engines import EngineClient
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.gateway.app import shared_gateway
from rollout.gateway.sessions import GatewaySession
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Sampling, Turn
from rollout.teams.roles import Agent, Role
from rollout.teams.team import Team, TeamSession
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import renderer_of


def team_of(engine: Any, renderer: Renderer, *, max_tokens: int = 24, **client: Any) -> Team:
    """Return a team of agents `a` and `b` on one policy, whose every non-empty reply is usable."""
    role = Role(name="r", system="", user="{said}", parse=lambda text: text or None)
    agents = {
        name: Agent(
            name=name,
            role=role,
            policy="p",
            sampling=Sampling(max_tokens=max_tokens, temperature=0.8, top_p=0.95),
        )
        for name in ("a", "b")
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=renderer, **client)})


def scripted_team(
    folder: Path, reply: Callable[[str, int], str], kind: str = "qwen2.5"
) -> tuple[Team, ScriptedEngine]:
    """Return a team whose replies are `reply(prompt, number of the call)`, and its engine."""
    renderer = renderer_of(kind, folder)

    def ids(prompt: tuple[int, ...], call: int) -> tuple[int, ...]:
        prompt_text = renderer.decode_prompt(prompt)
        return (*renderer.encode(reply(prompt_text, call)), renderer.stop[0])

    engine = ScriptedEngine(ids)
    return team_of(engine, renderer, max_tokens=1000), engine


def recording_team(
    folder: Path, reply: Callable[[str, int], str], kind: str = "qwen2.5"
) -> tuple[Team, list[str]]:
    """Return a team whose replies are `reply(prompt, number of the call)`, and the list of its prompts."""
    prompts: list[str] = []

    def record_and_reply(prompt: str, call: int) -> str:
        prompts.append(prompt)
        return reply(prompt, call)

    team, _ = scripted_team(folder, record_and_reply, kind)
    return team, prompts


def tiny_model(folder: Path, positions: int = 4096) -> Qwen2ForCausalLM:
    """Return a random model of bytes, saved beside the tokenizer of `renderer_of` in `folder`."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def sampling_team(
    folder: Path, *, max_length: int = 4096, **settings: Any
) -> tuple[Team, LocalEngine, Any]:
    """Return a team on the embedded engine, that engine, and Hugging Face's model of its weights."""
    renderer = renderer_of("qwen2.5", folder)
    model = tiny_model(folder, max_length)
    engine = LocalEngine(EmbeddedEngine.from_folder(folder, max_length=max_length, rows=32))
    return team_of(engine, renderer, max_length=max_length, **settings), engine, model


@asynccontextmanager
async def open_session(
    team: Team, **settings: Any
) -> AsyncIterator[tuple[str, str, TeamSession, GatewaySession]]:
    """Serve a trajectory's session; yield its URL, its key, the team's session and the gateway's."""
    team_session = team.session(1, 2, "t", 0)
    session = GatewaySession(team_session, **settings)
    async with shared_gateway() as gateway, gateway.serve_session(session) as (url, key):
        yield url, key, team_session, session


# A path and a body, or a function that makes them from the bodies of the replies so far.
GatewayRequest = tuple[str, dict[str, Any]] | Callable[[list[Any]], tuple[str, dict[str, Any]]]


def exchange(
    team: Team, requests: Sequence[GatewayRequest], **settings: Any
) -> tuple[list[Any], tuple[Turn, ...]]:
    """Post requests to a session one after the other; return the bodies of the replies, and the turns."""

    async def run() -> tuple[list[Any], tuple[Turn, ...]]:
        replies: list[Any] = []
        async with (
            open_session(team, **settings) as (url, key, team_session, _),
            httpx.AsyncClient(trust_env=False, timeout=60) as http,
        ):
            for request in requests:
                path, body = request(replies) if callable(request) else request
                headers = {"Authorization": f"Bearer {key}"}
                response = await http.post(f"{url}{path}", json=body, headers=headers)
                assert response.status_code == 200, response.text
                is_stream = body.get("stream", False)
                replies.append(response.text if is_stream else response.json())
        return replies, team_session.turns

    return asyncio.run(run())
