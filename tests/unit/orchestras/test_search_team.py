"""Orchestra `search_team`: the order of agents, their slots, and malformed replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retrieval.client import Passage
from rollout.environments.search import SearchEnv
from rollout.orchestras.replies import parse_answer, parse_enough, parse_query
from rollout.orchestras.search import search_team
from rollout.records.trajectory import Task
from rollout.teams.roles import ROLES, AgentReply
from rollout.teams.team import Team, TeamSession

TASK = Task(id="t", prompt="Who?", answers=("Otter",), env="search", source="one_hop", split="test")
ROLE_OF = {"verifier": "search_verifier", "searcher": "searcher", "answerer": "answerer"}
YES = "<verify>yes</verify>"
NO = "<verify>no</verify>"
ANSWER = "<answer>Otter</answer>"


class ScriptedSession(TeamSession):
    """Session whose agents give prepared replies in order, and which records their slots."""

    def __init__(self, replies: list[str]) -> None:
        super().__init__(Team({}, {}), ())
        self.remaining = replies
        self.agents_asked: list[str] = []
        self.slots: list[dict[str, object]] = []  # of each call

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        role = ROLES[ROLE_OF[name]]
        role.messages(**slots)  # raises KeyError if a slot of the shipped template is missing
        turn = len(self.slots)
        self.agents_asked.append(name)
        self.slots.append(slots)
        text = self.remaining.pop(0)
        return AgentReply(text=text, value=role.parse(text), turn=turn)


class Echo:
    """Retriever that finds one passage about every query."""

    async def search(self, query: str, k: int) -> list[Passage]:
        return [Passage.compose("0", query, f"about {query}")]


def play(*replies: str, **options: Any) -> ScriptedSession:
    """Play the task on these replies, all of which must be used."""
    session = ScriptedSession(list(replies))
    env = SearchEnv(TASK, retriever=Echo(), style="text")
    asyncio.run(search_team(TASK, session, env, **options))
    assert session.remaining == []
    return session


def test_the_team_searches_until_the_verifier_says_yes() -> None:
    session = play(NO, "<search>a</search>", NO, "<search>b</search>", YES, ANSWER)
    assert session.agents_asked == [*["verifier", "searcher"] * 2, "verifier", "answerer"]
    first = "<search> a </search>\n<information> about a </information>\n"
    both = first + "<search> b </search>\n<information> about b </information>\n"
    assert [slots["history"] for slots in session.slots] == ["", "", first, first, both, both]
    assert {slots["question"] for slots in session.slots} == {"Who?"}
    assert session.slots[1]["verdict"] == NO


def test_the_answerer_is_asked_in_the_last_turn_whatever_the_verdict() -> None:
    session = play(NO, "<search>a</search>", NO, ANSWER, max_turns=2)
    assert session.agents_asked == ["verifier", "searcher", "verifier", "answerer"]


def test_a_malformed_verdict_leads_to_a_search() -> None:
    session = play("<verify>perhaps</verify>", "<search>a</search>", YES, ANSWER)
    assert session.agents_asked == ["verifier", "searcher", "verifier", "answerer"]


def test_a_malformed_verdict_may_lead_to_the_answer() -> None:
    session = play("<verify>perhaps</verify>", ANSWER, malformed_verdict="answer")
    assert session.agents_asked == ["verifier", "answerer"]


def test_a_malformed_query_finds_nothing() -> None:
    session = play(NO, "I would search", YES, "Otter")
    assert session.agents_asked == ["verifier", "searcher", "verifier", "answerer"]
    assert session.slots[2]["history"] == "<search>  </search>\n<information> </information>\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<verify> YES </verify>", "yes"),
        ("<verify>yes</verify> wait <verify>no</verify>", "no"),
        ("<verify>maybe</verify>", None),
        ("<verify>yes", None),
        ("", None),
    ],
)
def test_parse_enough(text: str, value: str | None) -> None:
    assert parse_enough(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<search> Alice Walker </search>", "Alice Walker"),
        ("<search> a <search> b </search>", "b"),
        ("<search> <information> x </information> </search>", None),
        ("<search> </search>", None),
        ("Alice", None),
    ],
)
def test_parse_query(text: str, value: str | None) -> None:
    assert parse_query(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("<answer> Otter </answer>", "Otter"), ("<answer></answer>", None)]
)
def test_parse_answer(text: str, value: str | None) -> None:
    assert parse_answer(text) == value
