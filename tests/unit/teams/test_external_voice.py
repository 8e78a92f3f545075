"""A frozen model behind an API in a team: its turns are masked text, and come from the cache on resume."""

import asyncio
from dataclasses import replace

import pytest

from rollout.base.errors import EngineError
from rollout.engines.remote import RemoteConfig
from rollout.engines.remote.client import RemoteClient
from rollout.engines.remote.ledger import BudgetExhausted
from rollout.records.trajectory import Message, Sampling
from rollout.teams.team import Team
from tests.support.chat_server import Response, chat_server, says
from tests.support.play import make_team
from tests.support.scripted_engine import ScriptedEngine


def remote(url, **fields):
    return RemoteConfig(**{"model": "friend", "url": url, "retries": 0, "timeout_s": 5.0, **fields})


def mixed_team(voice) -> Team:
    """Return a team whose agent `b` has the policy `voice`."""
    team = make_team(ScriptedEngine(lambda prompt, call: (*b"7", 0)))
    agents = {**team.agents, "b": replace(team.agents["b"], policy="friend")}
    return Team(agents, {**team.policies, "friend": voice})


def play(config, folder, *seed_path):
    async def run():
        voice = RemoteClient(config, folder)
        try:
            session = mixed_team(voice).session(*seed_path)
            first = await session.act("a", said="1")
            second = await session.act("b", said=first.text)
            return session.turns, second, voice.metrics()
        finally:
            await voice.aclose()

    return asyncio.run(run())


def test_a_team_of_a_policy_and_a_frozen_model(tmp_path) -> None:
    with chat_server(says("42", prompt=9, reply=2)) as server:
        turns, reply, metrics = play(remote(server.url), tmp_path, 1)
        assert (reply.text, reply.value, reply.turn) == ("42", "42", 1)
        trained, other = turns
        assert (trained.masked, trained.completion_ids) == (False, (*b"7", 0))
        assert (other.masked, other.policy, other.text, other.valid) == (True, "friend", "42", True)
        assert (other.prompt_ids, other.completion_ids, other.logprobs) == ((), (), ())
        body = server.bodies[0]
        assert body["messages"] == [{"role": "user", "content": "7"}]
        assert (body["temperature"], body["max_tokens"], body["seed"]) == (
            0.7,
            99,
            other.seed % 2**63,
        )
        assert (metrics["calls"], metrics["tokens"]) == (1.0, 11.0)
        again, _, metrics = play(remote(server.url), tmp_path, 1)
        assert again == turns
        assert (metrics["calls"], metrics["cache_hits"], len(server.bodies)) == (0.0, 1.0, 1)
        play(remote(server.url), tmp_path, 2)  # another seed path samples again
    assert len(server.bodies) == 2


def test_failures_are_engine_errors_and_a_spent_budget_stops(tmp_path) -> None:
    async def say(config):
        voice = RemoteClient(config, tmp_path)
        try:
            await voice.say([Message(role="user", content="?")], Sampling())
        finally:
            await voice.aclose()

    with chat_server(Response(b"boom", status=500)) as server:
        with pytest.raises(EngineError, match=r"friend: status 500: boom \(after 1 calls\)"):
            asyncio.run(say(remote(server.url)))
        with pytest.raises(BudgetExhausted, match="2 calls would pass the limit of 1"):
            asyncio.run(say(remote(server.url, budget={"calls": 1})))
    with (
        chat_server(Response(b"no", status=400)) as server,
        pytest.raises(EngineError, match="friend: status 400: no"),
    ):
        asyncio.run(say(remote(server.url)))
    with (
        chat_server(says("late", delay_s=30)) as server,
        pytest.raises(EngineError, match=r"no reply within 0\.2 s"),
    ):
        asyncio.run(say(remote(server.url, deadline_s=0.2)))


def test_a_reply_that_was_cut_is_not_parsed(tmp_path) -> None:
    cut = {"choices": [{"message": {"content": "42"}, "finish_reason": "length"}]}
    with chat_server(says("", **cut)) as server:
        turns, reply, _ = play(remote(server.url), tmp_path, 1)
    assert (reply.text, reply.value, turns[1].valid) == ("42", None, False)
