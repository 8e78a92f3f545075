"""Graphs: the waves in which nodes run, what they see, and every mistake as one line before anything runs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from rollout.base.error_lines import error_line
from rollout.config.agents import AgentConfig, build_team
from rollout.config.orchestra import OrchestraConfig
from rollout.engines import EngineClient
from rollout.environments.search import SearchEnv
from rollout.orchestras.graph import Graph, graph
from rollout.orchestras.search import search_team
from rollout.records.trajectory import Task, Trajectory
from tests.support.play import TASK, Adder, Bytes, collect, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shipped import TEAMS, Library, play_shipped

SHIPPED = TEAMS["graph"]
QUESTION = Task(
    id="t", prompt="Who?", answers=("Alice",), env="search", source="hops", split="train"
)
YES, NO = "<verify>yes</verify>", "<verify>no</verify>"
ALICE = "<answer>Alice</answer>"


def by_hand(replies: list[str]) -> Trajectory:
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))
    agents = {
        name: AgentConfig(**config, policy="shared") for name, config in SHIPPED["agents"].items()
    }
    team = build_team(agents, {"shared": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]
    played = collect(
        [QUESTION],
        team,
        partial(SearchEnv, retriever=Library()),
        search_team,
        group_size=1,
        seed=1,
        step=0,
    )
    return asyncio.run(played)[0].trajectories[0]


@pytest.mark.parametrize(
    "replies",
    [
        [YES, ALICE],
        [NO, "<search>a</search>", NO, "<search>b</search>", YES, ALICE],
        [*[NO, "<search>a</search>"] * 3, NO, ALICE],
        ["perhaps", "a query without a tag", YES, "Alice"],
    ],
)
def test_the_shipped_graph_is_the_search_team(replies: list[str]) -> None:
    drawn, written = play_shipped("graph", QUESTION, replies, retriever=Library()), by_hand(replies)
    assert [(t.agent, t.messages, t.valid, t.round, t.seed) for t in drawn.turns] == [
        (t.agent, t.messages, t.valid, t.round, t.seed) for t in written.turns
    ]
    assert (drawn.outcome, drawn.metrics, drawn.tools) == (
        written.outcome,
        written.metrics,
        written.tools,
    )
    assert drawn.outcome == float(replies[-1] == ALICE)
    assert [turn.reward for turn in drawn.turns] == [
        drawn.outcome - 0.01 * (not turn.valid) for turn in drawn.turns
    ]


def ask(agent: str, said: str = "{problem}", **more: object) -> dict[str, Any]:
    return {"agent": agent, "slots": {"said": said}, **more}


def edge(source: str, target: str, when: str | None = None) -> dict[str, Any]:
    return {"from": source, "to": target} | ({"when": when} if when else {})


def draw(
    nodes: dict[str, Any], *edges: dict[str, Any], start: str | list[str] = "one"
) -> dict[str, Any]:
    return {"start": start, "nodes": nodes, "edges": list(edges)}


def play(
    drawn: dict[str, Any], *replies: str, max_steps: int = 16
) -> tuple[list[tuple[str, str]], Trajectory]:
    """What each agent in turn was told, and the trajectory, with the agents and the world of `tests.support.play`."""
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))

    async def orchestra(task: Task, team: Any, env: Any) -> None:
        await graph(task, team, env, graph=Graph.model_validate(drawn), max_steps=max_steps)

    played = collect([TASK], make_team(engine), Adder, orchestra, group_size=1, seed=1, step=0)
    (trajectory,) = asyncio.run(played)[0].trajectories
    assert len(engine.calls) == len(replies)
    return [(turn.agent, turn.messages[-1].content) for turn in trajectory.turns], trajectory


def test_a_wave_sees_what_was_before_it() -> None:
    nodes = {
        "one": ask("a"),
        "two": ask("b", "after {one}"),
        "sum": {"action": "{one}"},
        "last": ask("a", "{one}, {two}, {sum}; {history}", wait="all"),
        "end": {"action": "{last}"},
    }
    edges = [
        edge("one", "two"),
        edge("one", "sum"),
        edge("two", "last"),
        edge("sum", "last"),
        edge("last", "end"),
    ]
    told, trajectory = play(draw(nodes, *edges, start=["one", "two"]), "1", "2", "3", "4")
    # wave 1: one, two; wave 2: two, sum; wave 3: last; wave 4: end
    assert told == [
        ("a", "say numbers"),
        ("b", "after "),
        ("b", "after 1"),
        ("a", "1, 3, 1; 1\n1\n"),
    ]
    assert trajectory.outcome == 5.0
    assert [turn.scores["team"] for turn in trajectory.turns] == [1.0, 1.0, 1.0, 4.0]
    assert [turn.round for turn in trajectory.turns] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("wait", "told"), [("any", ["one", "two", "late", "late"]), ("all", ["one", "two", "late"])]
)
def test_waiting_for_all_runs_once_after_the_longest_way(wait: str, told: list[str]) -> None:
    nodes = {
        "one": ask("a", "one"),
        "two": ask("a", "two"),
        "late": ask("b", "late", wait=wait),
        "end": {"action": "0", "wait": wait},
    }
    edges = [edge("one", "two"), edge("one", "late"), edge("two", "late"), edge("late", "end")]
    seen, trajectory = play(draw(nodes, *edges), *"1234"[: len(told)])
    assert [text for _, text in seen] == told
    assert trajectory.outcome == 0.0


def test_a_loop_ends_by_its_condition_and_malformed_replies_are_empty() -> None:
    nodes = {"one": ask("a", "{one}|{one.text}|{one.runs}"), "end": {"action": "{one.runs}"}}
    edges = [
        edge("one", "one", "not one and one.runs < 3"),
        edge("one", "end", "len(one) > 0 or one.runs >= 3"),
    ]
    told, trajectory = play(draw(nodes, *edges), "no", "2")
    assert told == [("a", "||0"), ("a", "|no|1")]
    assert trajectory.outcome == 2.0
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert play(draw(nodes, *edges), "no", "no", "no")[1].outcome == 3.0


class Silent(Adder):
    """Takes an empty action for nothing."""

    async def step(self, action: str) -> Any:
        return await super().step(action or "-7")


@pytest.mark.parametrize(("when", "steps"), [("one == 'never'", 16), ("one == '1'", 1)])
def test_a_graph_without_an_action_is_scored_as_an_empty_reply(when: str, steps: int) -> None:
    drawn = draw({"one": ask("a"), "end": {"action": "5"}}, edge("one", "end", when))
    engine = ScriptedEngine(lambda _, call: (*b"1", 0))

    async def orchestra(task: Task, team: Any, env: Any) -> None:
        await graph(task, team, env, graph=Graph.model_validate(drawn), max_steps=steps)

    played = collect([TASK], make_team(engine), Silent, orchestra, group_size=1, seed=1, step=0)
    assert asyncio.run(played)[0].trajectories[0].outcome == -7.0


def test_what_fills_a_gap_is_not_filled_again() -> None:
    told, _ = play(
        draw(
            {"one": ask("a"), "two": ask("b", "{{x}} {one}"), "end": {"action": "0"}},
            edge("one", "two"),
            edge("two", "end"),
        ),
        "{problem} 1",
        "2",
    )
    assert told[1] == ("b", "{x} {problem} 1")


END = {"action": "0"}


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (3, "options.graph: Input should be an object (got 3)"),
        ({}, "options.graph.nodes: Field required"),
        ({"nodes": {}}, "graph.nodes: Dictionary should have at least 1 item"),
        (
            draw({"one": END}) | {"edge": []},
            "graph.edge: unknown key; nearest: edges",
        ),
        (
            draw({"one": {"agnt": "a"}}),
            "graph.nodes.one.agnt: unknown key; nearest: agent",
        ),
        (draw({"one": {}}), "graph.nodes.one: expected either agent, with its slots, or action"),
        (draw({"one": {"agent": "a", "action": "0"}}), "graph.nodes.one: expected either agent"),
        (draw({"one": {"agent": 3}}), "graph.nodes.one.agent: Input should be a valid string"),
        (
            draw({"one": {"agent": "a", "slots": ["b"]}}),
            "graph.nodes.one.slots: Input should be an object",
        ),
        (
            draw({"one": {**END, "wait": "some"}}),
            "graph.nodes.one.wait: Input should be 'any' or 'all'",
        ),
        (draw({"one": {"action": 0}}), "graph.nodes.one.action: Input should be a valid string"),
        (draw({"one": {"action": "{"}}), "graph.nodes.one.action: Single '{' encountered"),
        (
            draw({"one": {"action": "{problem!r}"}}),
            "graph.nodes.one.action: expected names alone between braces",
        ),
        (
            draw({"one": {"action": "{problem:9}"}}),
            "graph.nodes.one.action: expected names alone between braces",
        ),
        (
            draw({"one": {"action": "{problem.__class__}"}}),
            "node 'one', action: unknown name 'problem.__class__'",
        ),
        (
            draw({"one": ask("a", "{tow}"), "two": END}, edge("one", "two")),
            "slot 'said': unknown name 'tow'",
        ),
        (
            draw({"one-a": END}, start="one-a"),
            "graph.nodes.one-a: expected a name of letters, digits and _",
        ),
        (draw({"problem": END}, start="problem"), "graph.nodes.problem: expected a name"),
        (draw({"one": ask("a")}), "graph: no node has an action"),
        (draw({"one": END}, start="two"), "graph: start: unknown name 'two'; known: one"),
        (draw({"one": END}, start=3), "graph.start: Input should be a valid array"),  # type: ignore[arg-type]
        (
            draw({"one": END}, edge("one", "two")),
            "graph: edge 1, to: unknown name 'two'; known: one",
        ),
        (draw({"one": END}, {"to": "one"}), "graph.edges.0.from: Field required"),
        (
            draw({"one": END}, edge("one", "one") | {"if": "x"}),
            "graph.edges.0.if: unknown key; known here: from, to, when",
        ),
        (
            draw({"one": END}, edge("one", "one") | {"when": True}),
            "graph.edges.0.when: Input should be a valid string",
        ),
        (
            draw({"one": END}, edge("one", "one", "tow == 'a'")),
            "graph: edge 1: unknown name 'tow'",
        ),
        (
            draw({"one": END}, edge("one", "one", "one()")),
            "graph.edges.0.when: condition 'one()': 'one()' is not allowed",
        ),
        (
            draw({"one": END}, edge("one", "one", "one or one < 3")),
            "graph: condition 'one or one < 3': '<'",
        ),
        (draw({"one": END, "two": END}), "graph: node 'two' is never reached from start (one)"),
        (draw({"one": END}, start=[]), "graph: node 'one' is never reached from start (empty)"),
        (draw({"one": END}, edge("one", "one")), "graph: the cycle one -> one has no condition"),
        (
            draw(
                {"one": END, "two": END, "three": END},
                edge("one", "two"),
                edge("two", "three"),
                edge("three", "two"),
            ),
            "graph: the cycle two -> three -> two has no condition; give one of its edges a when",
        ),
    ],
)
def test_a_mistake_is_one_line(drawn: Any, message: str) -> None:
    values = {"name": "graph", "options": {"graph": drawn}}
    with pytest.raises(ValidationError) as refused:
        OrchestraConfig(**values)
    line = error_line(refused.value, OrchestraConfig, values)
    assert message in line
    assert "\n" not in line


def test_a_diamond_is_no_cycle() -> None:
    nodes = {"one": ask("a"), "two": ask("a"), "three": ask("b"), "end": END}
    ways = [("one", "two"), ("one", "three"), ("two", "end"), ("three", "end")]
    assert len(Graph.model_validate(draw(nodes, *(edge(*way) for way in ways))).edges) == 4


def test_nodes_must_fit_the_team() -> None:
    config = OrchestraConfig(**SHIPPED["orchestra"])
    agents = {
        name: AgentConfig(**values, policy="shared") for name, values in SHIPPED["agents"].items()
    }
    config.check_agents(agents)
    with pytest.raises(
        ValueError,
        match="node 'query' asks agent 'searcher', who is not in the team; agents: verif",
    ):
        config.check_agents({name: agent for name, agent in agents.items() if name != "searcher"})
    asking = agents | {"answerer": AgentConfig(policy="shared", user="{question} {plan}")}
    with pytest.raises(
        ValueError,
        match="node 'conclude' does not fill slot 'plan' of agent 'answerer'; add it to the node's slots",
    ):
        config.check_agents(asking)
    Graph.model_validate(draw({"one": END})).check_agents({})


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        OrchestraConfig(name="graph", options={"graph": draw({"one": END}), "max_steps": 0})
