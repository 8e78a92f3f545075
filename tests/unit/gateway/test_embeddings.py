"""Embeddings of a served run by its retriever's encoder, with OpenAI's client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from mcore_mas.evaluation.served_team import ServedTeam
from retrieval.encoder import Encoder
from rollout.base.http_server import answering, listener_url, open_listener
from rollout.gateway.app import GatewayHandlers, gateway_app
from rollout.teams.collect import Collector
from tests.support.gateway import open_session, scripted_team
from tests.support.play import Adder
from tests.support.tiny_bert import write_bert

TEXTS = ["seven apples", "three pears and seven apples"]


def served(folder: Path, encoder: Encoder | None) -> ServedTeam:
    team, _ = scripted_team(folder, lambda prompt, n: "7")
    collector = Collector(team=team, make_env=Adder, orchestra=None, seed=0, step=0)  # type: ignore[arg-type]
    return ServedTeam(name="run", env="math", collector=collector, encoder=encoder)


async def embed(backend: ServedTeam, **fields: Any) -> Any:
    listener = open_listener("127.0.0.1", 0)
    url = listener_url(listener)
    app = gateway_app(GatewayHandlers(lambda _: backend, 4), "")
    async with (
        answering(app, listener, print),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        return await api.embeddings.create(model="encoder", input=TEXTS, **fields)


def test_embeddings_are_the_encoders_vectors(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", TEXTS, seed=0)
    encoder = Encoder.of("bge", tmp_path / "bert")
    expected = encoder.encode_passages(TEXTS)
    for fields in ({}, {"encoding_format": "float"}):  # the client's default is base64
        reply = asyncio.run(embed(served(tmp_path / "model", encoder), **fields))
        vectors = np.array([row.embedding for row in reply.data], dtype=np.float32)
        assert np.array_equal(vectors, expected)
        assert [row.index for row in reply.data] == [0, 1]


def test_without_an_encoder_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(openai.NotFoundError, match="has no retriever with an encoder"):
        asyncio.run(embed(served(tmp_path, None)))

    async def ask_in_a_trajectory() -> None:
        team, _ = scripted_team(tmp_path, lambda prompt, n: "7")
        async with (
            open_session(team) as (url, key, _, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api,
        ):
            await api.embeddings.create(model="encoder", input="x")

    with pytest.raises(openai.NotFoundError, match="no embeddings in a trajectory"):
        asyncio.run(ask_in_a_trajectory())
