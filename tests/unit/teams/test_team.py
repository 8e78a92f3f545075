"""Teams and their sessions: keys of states, sampling of all agents, and calls after the end."""

from __future__ import annotations

import asyncio

import pytest

from rollout.engines import EngineClient
from rollout.records.trajectory import Sampling
from rollout.teams import roles
from rollout.teams.roles import Agent, Parser, Role, register_agent
from rollout.teams.team import Team
from tests.support.play import Bytes, make_team
from tests.support.scripted_engine import ScriptedEngine


def state_key(system: str, user: str) -> str:
    """Return the state key of a turn whose agent got these two texts."""
    role = Role(name="r", system=system, user="{user}", parse=str)
    agent = Agent(name="r", role=role, policy="p", sampling=Sampling())

    class Blind(Bytes):
        def render(self, messages):
            return (1,)

    session = Team(
        {"r": agent}, {"p": EngineClient(engine=ScriptedEngine({(1,): (0,)}), renderer=Blind())}
    ).session(0)
    asyncio.run(session.act("r", user=user))
    return session.turns[0].state_key


@pytest.mark.parametrize(
    "other",
    [("ab", "c"), ("a", "bc "), ("", "abc"), ("a1:", "bc"), ("abc", "")],
)
def test_a_state_key_depends_on_every_message_and_its_boundaries(other):
    assert state_key("a", "bc") == state_key("a", "bc") != state_key(*other)


def test_a_state_key_is_defined_for_invalid_unicode():
    assert state_key("", "half a pair \ud83d") == state_key("", "half a pair \ufffd")


def test_with_sampling_changes_the_temperature_only():
    team = make_team(ScriptedEngine({}))
    cold = team.with_sampling(temperature=0.0)
    assert {agent.sampling for agent in cold.agents.values()} == {
        Sampling(max_tokens=99, temperature=0.0)
    }
    assert cold.with_sampling(temperature=0.7) == team


def test_a_metric_called_team_does_not_change_the_reward_of_a_turn():
    session = make_team(ScriptedEngine(lambda *_: (*b"1", 0))).session(0)
    asyncio.run(session.act("a", said="x"))
    session.credit_step(0.5, {"team": 10.0, "solved": 0.0})
    session.credit_step(0.25, {"team": 20.0, "solved": 1.0})
    assert session.turns[0].scores == {"team": 0.75, "solved": 1.0}


def test_a_closed_session_asks_no_engine():
    engine = ScriptedEngine({})
    session = make_team(engine).session(0)

    async def late():
        await session.close()
        with pytest.raises(asyncio.CancelledError):
            await session.act("a", said="x")

    asyncio.run(late())
    assert engine.calls == []


def test_a_role_of_the_user_replaces_one_that_ships_and_not_another_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse_of(module: str) -> Parser:
        def parse(text: str) -> str:
            return text

        parse.__module__ = module
        return parse

    monkeypatch.setattr(roles, "ROLES", {})
    register_agent("scout", system="", user="{area}")(parse_of("rollout.orchestras.memory"))
    register_agent("scout", system="", user="{forest}")(parse_of("mine"))
    assert roles.ROLES["scout"].user == "{forest}"
    register_agent("scout", system="", user="{area}")(parse_of("rollout.orchestras.memory"))
    assert roles.ROLES["scout"].user == "{forest}"  # the module that ships was imported later

    message = "agent role 'scout' is registered twice, in mine and in other; give one of them"
    with pytest.raises(ValueError, match=message):
        register_agent("scout", system="", user="")(parse_of("other"))
