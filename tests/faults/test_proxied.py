"""What happens to answers on their way: to those of a coach, a remote model, a gateway, and MLflow's server."""

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


@pytest.mark.parametrize("name", NAMES)
def test_a_coach_is_asked_again_and_its_score_is_the_one_that_it_gave(
    tmp_path: Path, name: str
) -> None:
    async def score(url: str) -> object:
        async with aclosing(Coach(config(f"{url}/v1"), tmp_path)) as coach:
            (judged,) = await coach.score([group(trajectory(turn(0, "solver", "x")))])
            return judged.trajectories[0].turns[0].scores

    verdict = says(
        " " * 400 + "PROCESS_SCORE: 7"
    )  # the first letter behind the middle of the answer is P
    with chat_server(verdict) as server, FaultProxy(server.url).running() as proxy:
        proxy.faulty = (name, 1)
        assert asyncio.run(score(proxy.url)) == {"process": 7.0}
    assert proxy.done[name] == 1
    assert len(server.bodies) == (1 if name in ("delay", "drop") else 2)


@pytest.mark.parametrize("name", NAMES)  # of a text any letter may be right
def test_a_remote_model_is_asked_again_and_its_reply_is_the_one_that_it_gave(
    tmp_path: Path, name: str
) -> None:
    async def say(url: str) -> str:
        voice = RemoteClient(RemoteConfig(model="friend", url=f"{url}/v1"), tmp_path)
        async with aclosing(voice):
            return (await voice.say([Message(role="user", content="?")], Sampling())).text

    with chat_server(says("forty-two")) as server, FaultProxy(server.url).running() as proxy:
        proxy.faulty = (name, 1)
        assert asyncio.run(say(proxy.url)) == "forty-two"
        assert asyncio.run(say(proxy.url)) == "forty-two"  # from what is kept
    assert proxy.done[name] == 1
    assert len(server.bodies) == (1 if name in ("delay", "drop") else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mlflow_has_every_step_once(tmp_path: Path, mlflow_server: Server, name: str) -> None:
    """The first request that writes, then one of each batch of rows, meets the fault."""
    mlflow_server.start()
    rows = [step_row(step) for step in STEPS]
    with FaultProxy(mlflow_server.uri).running() as proxy:
        config = write_run(tmp_path, proxy.url)
        proxy.faulty = (name, 1)
        writer = until_it_works(lambda: open_writer(config))
        for start in (0, 3, 6):
            proxy.faulty = (name, 1)
            until_it_works(lambda start=start: writer.write(rows[start : start + 3]))
        assert proxy.done[name] == 4
    assert_sent_once(mlflow_server.uri, writer.run_id)


def until_it_works(call: Callable[[], Any]) -> Any:
    """Call again after an error, as the thread that sends metrics does."""
    for _ in range(3):
        with suppress(Exception):
            return call()
    return call()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "garbage"])
def test_a_gateways_caller_reads_what_was_sampled_once(tmp_path: Path, name: str) -> None:
    """OpenAI's client asks again by itself. On the loopback no letter changes, and nobody else answers."""
    team, _ = scripted_team(tmp_path, lambda prompt, n: f"reply {n}")

    async def run(proxy: FaultProxy) -> tuple[str | None, list[str]]:
        async with open_session(team) as (url, key, team_session, _):
            proxy._target = urlsplit(url)
            through = proxy.url + urlsplit(url).path
            async with AsyncOpenAI(base_url=f"{through}/v1", api_key=key, timeout=20) as api:
                reply = await api.chat.completions.create(
                    model="a", messages=[{"role": "user", "content": "q"}]
                )
            return reply.choices[0].message.content, [turn.text for turn in team_session.turns]

    with FaultProxy("http://127.0.0.1:1").running() as proxy:
        proxy.faulty = (name, 1)
        said, turns = asyncio.run(run(proxy))
    assert proxy.done[name] == 1
    assert [said] == turns == ["reply 0"]
