"""Seats: what identifies a state, and a team at another temperature."""

from __future__ import annotations

import asyncio

import pytest

from rollout.engines import EngineClient
from rollout.records.trajectory import Sampling
from rollout.teams.roles import Agent, Role
from rollout.teams.team import Team
from tests.support.play import Bytes, make_team
from tests.support.scripted_engine import ScriptedEngine


def state(system: str, user: str) -> str:
    """The state key of a turn whose agent saw these two texts."""
    role = Role(name="r", system=system, user="{user}", parse=str)
    agent = Agent(name="r", role=role, policy="p", sampling=Sampling())

    class Blind(Bytes):
        def render(self, messages):
            return (1,)

    seat = Team(
        {"r": agent}, {"p": EngineClient(engine=ScriptedEngine({(1,): (0,)}), renderer=Blind())}
    ).session(0)
    asyncio.run(seat.act("r", user=user))
    return seat.turns[0].state_key


@pytest.mark.parametrize(
    "other",
    [("ab", "c"), ("a", "bc "), ("", "abc"), ("a1:", "bc"), ("abc", "")],
)
def test_a_state_is_every_message_from_its_start_to_its_end(other):
    assert state("a", "bc") == state("a", "bc") != state(*other)


def test_a_state_may_hold_any_text():
    assert state("", "half a pair \ud83d") == state("", "half a pair \ufffd")


def test_another_temperature_changes_nothing_else():
    team = make_team(ScriptedEngine({}))
    cold = team.with_sampling(temperature=0.0)
    assert {agent.sampling for agent in cold.agents.values()} == {
        Sampling(max_tokens=99, temperature=0.0)
    }
    assert cold.with_sampling(temperature=0.7) == team


def test_an_orchestra_that_has_ended_asks_nobody():
    engine = ScriptedEngine({})
    seat = make_team(engine).session(0)

    async def late():
        await seat.close()
        with pytest.raises(asyncio.CancelledError):
            await seat.act("a", said="x")

    asyncio.run(late())
    assert engine.calls == []
