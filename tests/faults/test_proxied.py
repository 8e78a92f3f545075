"""Answers of a coach, a remote model, a gateway and MLflow's server that are damaged on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI

from rollout.engines.remote import RemoteConfig
from rollout.engines.remote.client import RemoteClient
from rollout.records.trajectory import Message, Sampling
from rollout.rewards.coach import Coach
from tests.faults.proxy import NAMES, FaultProxy
from tests.support.chat_server import chat_server, says
from tests.support.coached import config, group, trajectory, turn
from tests.support.gateway import open_session, scripted_team
from tests.support.mlflow_server import STEPS, Server, assert_sent_once
from tests.support.tracked_run import open_writer, step_row, write_run


def requests_until_success(fault: str) -> int:
    """Return the number of requests that the server gets if the first has a fault.

    A delayed answer is used, and a dropped request never reaches the server.
    """
    return 1 if fault in ("delay", "drop") else 2


@pytest.mark.parametrize("fault", NAMES)
def test_a_coach_with_a_faulty_answer_is_asked_again(tmp_path: Path, fault: str) -> None:
    async def score(url: str) -> object:
        async with aclosing(Coach(config(f"{url}/v1"), tmp_path)) as coach:
            (scored,) = await coach.score([group(trajectory(turn(0, "solver", "x")))])
            return scored.trajectories[0].turns[0].scores

    # The score stands in the second half of the answer, which `cut` removes.
    verdict = says(" " * 400 + "PROCESS_SCORE: 7")
    with chat_server(verdict) as server, FaultProxy(server.url).running() as proxy:
        proxy.faulty = (fault, 1)
        assert asyncio.run(score(proxy.url)) == {"process": 7.0}
    assert proxy.done[fault] == 1
    assert len(server.bodies) == requests_until_success(fault)


@pytest.mark.parametrize("fault", NAMES)
def test_a_remote_model_with_a_faulty_answer_is_asked_again(tmp_path: Path, fault: str) -> None:
    async def ask(url: str) -> str:
        client = RemoteClient(RemoteConfig(model="friend", url=f"{url}/v1"), tmp_path)
        async with aclosing(client):
            return (await client.say([Message(role="user", content="?")], Sampling())).text

    with chat_server(says("forty-two")) as server, FaultProxy(server.url).running() as proxy:
        proxy.faulty = (fault, 1)
        assert asyncio.run(ask(proxy.url)) == "forty-two"
        assert asyncio.run(ask(proxy.url)) == "forty-two"  # read from the cache on disk
    assert proxy.done[fault] == 1
    assert len(server.bodies) == requests_until_success(fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMES)
def test_mlflow_has_every_step_once(tmp_path: Path, mlflow_server: Server, fault: str) -> None:
    """The first request of the writer and of each batch of rows gets the fault."""
    mlflow_server.start()
    rows = [step_row(step) for step in STEPS]
    with FaultProxy(mlflow_server.uri).running() as proxy:
        config = write_run(tmp_path, proxy.url)
        proxy.faulty = (fault, 1)
        writer = retry(lambda: open_writer(config))
        for start in (0, 3, 6):
            proxy.faulty = (fault, 1)
            retry(lambda start=start: writer.write(rows[start : start + 3]))
        assert proxy.done[fault] == 4
    assert_sent_once(mlflow_server.uri, writer.run_id)


def retry(call: Callable[[], Any]) -> Any:
    """Call up to four times until it succeeds, as the thread that sends metrics does."""
    for _ in range(3):
        with suppress(Exception):
            return call()
    return call()


@pytest.mark.parametrize("fault", [name for name in NAMES if name != "garbage"])
def test_a_reply_that_a_gateways_client_asks_for_again_is_sampled_once(
    tmp_path: Path, fault: str
) -> None:
    """OpenAI's client retries. On the loopback interface nothing replaces an answer by garbage."""
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")

    async def ask(proxy: FaultProxy) -> tuple[str | None, list[str]]:
        async with open_session(team) as (url, key, team_session, _):
            proxy.target = urlsplit(url)
            base_url = f"{proxy.url}{urlsplit(url).path}/v1"
            async with AsyncOpenAI(base_url=base_url, api_key=key, timeout=20) as client:
                completion = await client.chat.completions.create(
                    model="a", messages=[{"role": "user", "content": "q"}]
                )
            sampled = [turn.text for turn in team_session.turns]
            return completion.choices[0].message.content, sampled

    with FaultProxy("http://127.0.0.1:1").running() as proxy:
        proxy.faulty = (fault, 1)
        reply, sampled = asyncio.run(ask(proxy))
    assert proxy.done[fault] == 1
    assert sampled == ["reply 0"]
    assert reply == "reply 0"
