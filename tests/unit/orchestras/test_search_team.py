"""The search team: who speaks when, and what a malformed reply leads to."""

from __future__ import annotations

import asyncio

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
YES, NO = "<verify>yes</verify>", "<verify>no</verify>"


class Script(TeamSession):
    """A seat whose agents say their lines in order."""

    def __init__(self, *lines: str) -> None:
        super().__init__(Team({}, {}), ())
        self.lines = list(lines)
        self.said: list[tuple[str, dict[str, object]]] = []

    async def act(self, name: str, /, **slots: object) -> AgentReply:
        ROLES[ROLE_OF[name]].messages(**slots)  # every slot of the default template is given
        self.said.append((name, slots))
        text = self.lines.pop(0)
        return AgentReply(
            text=text, value=ROLES[ROLE_OF[name]].parse(text), turn=len(self.said) - 1
        )

    @property
    def order(self) -> str:
        return "".join(name[0] for name, _ in self.said)


class Echo:
    async def search(self, query: str, k: int) -> list[Passage]:
        return [Passage.compose("0", query, f"about {query}")]


def play(script: Script, **options: object) -> None:
    asyncio.run(
        search_team(TASK, script, SearchEnv(TASK, retriever=Echo(), style="text"), **options)
    )  # type: ignore[arg-type]
    assert script.lines == []


def test_searches_until_the_verifier_is_content() -> None:
    script = Script(
        NO, "<search>a</search>", NO, "<search>b</search>", YES, "<answer>Otter</answer>"
    )
    play(script)
    assert script.order == "vsvsva"
    first = "<search> a </search>\n<information> about a </information>\n"
    second = "<search> b </search>\n<information> about b </information>\n"
    assert [slots["history"] for _, slots in script.said] == [
        "",
        "",
        first,
        first,
        first + second,
        first + second,
    ]
    assert all(slots["question"] == "Who?" for _, slots in script.said)
    assert script.said[1][1]["verdict"] == NO


def test_last_turn_forces_the_answerer() -> None:
    script = Script(NO, "<search>a</search>", NO, "<answer>Otter</answer>")
    play(script, max_turns=2)
    assert script.order == "vsva"


@pytest.mark.parametrize(("option", "order"), [("search", "vsva"), ("answer", "va")])
def test_malformed_verdict(option: str, order: str) -> None:
    lines = ["<verify>perhaps</verify>", "<answer>Otter</answer>"]
    if option == "search":
        lines[1:1] = ["<search>a</search>", YES]
    script = Script(*lines)
    play(script, malformed_verdict=option)
    assert script.order == order


def test_malformed_query_leaves_an_empty_note() -> None:
    script = Script(NO, "I would search", YES, "Otter")
    play(script)
    assert script.order == "vsva"
    assert script.said[2][1]["history"] == "<search>  </search>\n<information> </information>\n"


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
def test_parse_verdict(text: str, value: str | None) -> None:
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
