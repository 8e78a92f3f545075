"""Orchestra `graph`: waves of nodes, the values that they use, and errors of the config."""

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
from tests.support.casts import validity
from tests.support.play import TASK, Adder, Bytes, collect, make_team
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shipped import TEAMS, Library, play_shipped

SHIPPED = TEAMS["graph"]
SHIPPED_AGENTS = {
    name: AgentConfig(**config, policy="shared") for name, config in SHIPPED["agents"].items()
}
QUESTION = Task(
    id="t", prompt="Who?", answers=("Alice",), env="search", source="hops", split="train"
)
YES = "<verify>yes</verify>"
NO = "<verify>no</verify>"
ALICE = "<answer>Alice</answer>"


def play_search_team(replies: list[str]) -> Trajectory:
    """Play the orchestra `search_team` with the agents of the shipped graph."""
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))
    client = EngineClient(engine=engine, renderer=Bytes())  # type: ignore[arg-type]
    team = build_team(SHIPPED_AGENTS, {"shared": client})
    make_env = partial(SearchEnv, retriever=Library())
    played = collect([QUESTION], team, make_env, search_team, group_size=1, seed=1, step=0)
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
def test_the_shipped_graph_plays_as_search_team(replies: list[str]) -> None:
    trajectory = play_shipped("graph", QUESTION, replies, retriever=Library())
    expected = play_search_team(replies)
    for turn, expected_turn in zip(trajectory.turns, expected.turns, strict=True):
        assert turn.agent == expected_turn.agent
        assert turn.messages == expected_turn.messages
        assert turn.valid == expected_turn.valid
        assert turn.round == expected_turn.round
        assert turn.seed == expected_turn.seed
        penalty = 0.0 if turn.valid else 0.01
        assert turn.reward == expected.outcome - penalty
    assert trajectory.outcome == expected.outcome == float(replies[-1] == ALICE)
    assert trajectory.metrics == expected.metrics
    assert trajectory.tools == expected.tools


def ask(agent: str, text: str = "{problem}", **settings: object) -> dict[str, Any]:
    """Return a node that asks an agent; `text` is the template of the agent's slot `said`."""
    return {"agent": agent, "slots": {"said": text}, **settings}


def edge(source: str, target: str, when: str | None = None) -> dict[str, Any]:
    condition = {"when": when} if when else {}
    return {"from": source, "to": target, **condition}


def make_graph(
    nodes: dict[str, Any], *edges: dict[str, Any], start: str | list[str] = "one"
) -> dict[str, Any]:
    """Return the option `graph` as a config states it."""
    return {"start": start, "nodes": nodes, "edges": list(edges)}


def play(
    config: dict[str, Any], *replies: str, make_env: Any = Adder, max_steps: int = 16
) -> Trajectory:
    """Play a graph with the agents and the environment of `tests.support.play`."""
    engine = ScriptedEngine(lambda _, call: (*replies[call].encode(), 0))
    orchestra = partial(graph, graph=Graph.model_validate(config), max_steps=max_steps)
    played = collect([TASK], make_team(engine), make_env, orchestra, group_size=1, seed=1, step=0)
    (trajectory,) = asyncio.run(played)[0].trajectories
    assert len(engine.calls) == len(replies)
    return trajectory


def prompts(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return agent and prompt of every turn."""
    return [(turn.agent, turn.messages[-1].content) for turn in trajectory.turns]


def test_the_nodes_of_a_wave_use_the_values_before_it() -> None:
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
    # The waves are: one and two; two and sum; last; end.
    trajectory = play(make_graph(nodes, *edges, start=["one", "two"]), "1", "2", "3", "4")
    assert prompts(trajectory) == [
        ("a", "say numbers"),
        ("b", "after "),
        ("b", "after 1"),
        ("a", "1, 3, 1; 1\n1\n"),
    ]
    assert trajectory.outcome == 5.0
    assert [turn.scores["team"] for turn in trajectory.turns] == [1.0, 1.0, 1.0, 4.0]
    assert [turn.round for turn in trajectory.turns] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("wait", "expected"),
    [("any", ["one", "two", "late", "late"]), ("all", ["one", "two", "late"])],
)
def test_a_node_may_wait_for_all_edges_into_it(wait: str, expected: list[str]) -> None:
    nodes = {
        "one": ask("a", "one"),
        "two": ask("a", "two"),
        "late": ask("b", "late", wait=wait),
        "end": {"action": "0", "wait": wait},
    }
    edges = [edge("one", "two"), edge("one", "late"), edge("two", "late"), edge("late", "end")]
    trajectory = play(make_graph(nodes, *edges), *["1"] * len(expected))
    assert [text for _, text in prompts(trajectory)] == expected
    assert trajectory.outcome == 0.0


LOOP = make_graph(
    {"one": ask("a", "{one}|{one.text}|{one.runs}"), "end": {"action": "{one.runs}"}},
    edge("one", "one", "not one and one.runs < 3"),
    edge("one", "end", "len(one) > 0 or one.runs >= 3"),
)


def test_the_value_of_a_malformed_reply_is_empty() -> None:
    trajectory = play(LOOP, "no", "2")
    assert prompts(trajectory) == [("a", "||0"), ("a", "|no|1")]
    assert validity(trajectory) == [False, True]
    assert trajectory.outcome == 2.0


def test_a_condition_ends_a_loop() -> None:
    trajectory = play(LOOP, "no", "no", "no")
    assert trajectory.outcome == 3.0


class EmptyReplyEnv(Adder):
    """Environment that scores an empty action -7."""

    async def step(self, action: str) -> Any:
        return await super().step(action or "-7")


@pytest.mark.parametrize(("when", "max_steps"), [("one == 'never'", 16), ("one == '1'", 1)])
def test_a_graph_without_an_action_is_scored_as_an_empty_reply(when: str, max_steps: int) -> None:
    config = make_graph({"one": ask("a"), "end": {"action": "5"}}, edge("one", "end", when))
    trajectory = play(config, "1", make_env=EmptyReplyEnv, max_steps=max_steps)
    assert trajectory.outcome == -7.0


def test_braces_in_a_value_are_not_filled() -> None:
    nodes = {"one": ask("a"), "two": ask("b", "{{x}} {one}"), "end": {"action": "0"}}
    config = make_graph(nodes, edge("one", "two"), edge("two", "end"))
    trajectory = play(config, "{problem} 1", "2")
    assert prompts(trajectory)[1] == ("b", "{x} {problem} 1")


END = {"action": "0"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "options.graph: Input should be an object (got 3)"),
        ({}, "options.graph.nodes: Field required"),
        ({"nodes": {}}, "graph.nodes: Dictionary should have at least 1 item"),
        (
            make_graph({"one": END}) | {"edge": []},
            "graph.edge: unknown key; nearest: edges",
        ),
        (
            make_graph({"one": {"agnt": "a"}}),
            "graph.nodes.one.agnt: unknown key; nearest: agent",
        ),
        (
            make_graph({"one": {}}),
            "graph.nodes.one: expected either agent, with its slots, or action",
        ),
        (
            make_graph({"one": {"agent": "a", "action": "0"}}),
            "graph.nodes.one: expected either agent",
        ),
        (
            make_graph({"one": {"agent": 3}}),
            "graph.nodes.one.agent: Input should be a valid string",
        ),
        (
            make_graph({"one": {"agent": "a", "slots": ["b"]}}),
            "graph.nodes.one.slots: Input should be an object",
        ),
        (
            make_graph({"one": {**END, "wait": "some"}}),
            "graph.nodes.one.wait: Input should be 'any' or 'all'",
        ),
        (
            make_graph({"one": {"action": 0}}),
            "graph.nodes.one.action: Input should be a valid string",
        ),
        (make_graph({"one": {"action": "{"}}), "graph.nodes.one.action: Single '{' encountered"),
        (
            make_graph({"one": {"action": "{problem!r}"}}),
            "graph.nodes.one.action: expected names alone between braces",
        ),
        (
            make_graph({"one": {"action": "{problem:9}"}}),
            "graph.nodes.one.action: expected names alone between braces",
        ),
        (
            make_graph({"one": {"action": "{problem.__class__}"}}),
            "node 'one', action: unknown name 'problem.__class__'",
        ),
        (
            make_graph({"one": ask("a", "{tow}"), "two": END}, edge("one", "two")),
            "slot 'said': unknown name 'tow'",
        ),
        (
            make_graph({"one-a": END}, start="one-a"),
            "graph.nodes.one-a: expected a name of letters, digits and _",
        ),
        (make_graph({"problem": END}, start="problem"), "graph.nodes.problem: expected a name"),
        (make_graph({"one": ask("a")}), "graph: no node has an action"),
        (make_graph({"one": END}, start="two"), "graph: start: unknown name 'two'; known: one"),
        (make_graph({"one": END}, start=3), "graph.start: Input should be a valid array"),  # type: ignore[arg-type]
        (
            make_graph({"one": END}, edge("one", "two")),
            "graph: edge 1, to: unknown name 'two'; known: one",
        ),
        (make_graph({"one": END}, {"to": "one"}), "graph.edges.0.from: Field required"),
        (
            make_graph({"one": END}, edge("one", "one") | {"if": "x"}),
            "graph.edges.0.if: unknown key; known here: from, to, when",
        ),
        (
            make_graph({"one": END}, edge("one", "one") | {"when": True}),
            "graph.edges.0.when: Input should be a valid string",
        ),
        (
            make_graph({"one": END}, edge("one", "one", "tow == 'a'")),
            "graph: edge 1: unknown name 'tow'",
        ),
        (
            make_graph({"one": END}, edge("one", "one", "one()")),
            "graph.edges.0.when: condition 'one()': 'one()' is not allowed",
        ),
        (
            make_graph({"one": END}, edge("one", "one", "one or one < 3")),
            "graph: condition 'one or one < 3': '<'",
        ),
        (
            make_graph({"one": END, "two": END}),
            "graph: node 'two' is never reached from start (one)",
        ),
        (
            make_graph({"one": END}, start=[]),
            "graph: node 'one' is never reached from start (empty)",
        ),
        (
            make_graph({"one": END}, edge("one", "one")),
            "graph: the cycle one -> one has no condition",
        ),
        (
            make_graph(
                {"one": END, "two": END, "three": END},
                edge("one", "two"),
                edge("two", "three"),
                edge("three", "two"),
            ),
            "graph: the cycle two -> three -> two has no condition; give one of its edges a when",
        ),
    ],
)
def test_an_error_of_the_config_is_one_line(config: Any, message: str) -> None:
    values = {"name": "graph", "options": {"graph": config}}
    with pytest.raises(ValidationError) as refusal:
        OrchestraConfig(**values)
    line = error_line(refusal.value, OrchestraConfig, values)
    assert message in line
    assert "\n" not in line


def test_two_paths_to_one_node_are_no_cycle() -> None:
    nodes = {"one": ask("a"), "two": ask("a"), "three": ask("b"), "end": END}
    edges = [edge("one", "two"), edge("one", "three"), edge("two", "end"), edge("three", "end")]
    assert len(Graph.model_validate(make_graph(nodes, *edges)).edges) == 4


def test_the_shipped_agents_fit_the_shipped_graph() -> None:
    OrchestraConfig(**SHIPPED["orchestra"]).check_agents(SHIPPED_AGENTS)


def test_a_graph_of_actions_needs_no_agents() -> None:
    Graph.model_validate(make_graph({"one": END})).check_agents({})


def test_a_node_may_only_ask_an_agent_of_the_team() -> None:
    team = {name: agent for name, agent in SHIPPED_AGENTS.items() if name != "searcher"}
    expected = "node 'query' asks agent 'searcher', who is not in the team; agents: verif"
    with pytest.raises(ValueError, match=expected):
        OrchestraConfig(**SHIPPED["orchestra"]).check_agents(team)


def test_a_node_must_fill_the_slots_of_its_agent() -> None:
    answerer = AgentConfig(policy="shared", user="{question} {plan}")
    expected = "node 'conclude' does not fill slot 'plan' of agent 'answerer'; add it to the node"
    with pytest.raises(ValueError, match=expected):
        OrchestraConfig(**SHIPPED["orchestra"]).check_agents(
            {**SHIPPED_AGENTS, "answerer": answerer}
        )


def test_a_graph_has_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        OrchestraConfig(name="graph", options={"graph": make_graph({"one": END}), "max_steps": 0})
