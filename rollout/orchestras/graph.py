"""Workflow graph from the config: agents and actions as nodes, conditions on the edges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import JsonValue, PositiveInt

from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.graph import Graph, GraphNode, read_graph
from rollout.teams.team import TeamSession


async def graph(
    task: Task, team: TeamSession, env: Env, *, graph: Mapping[str, JsonValue], max_steps: PositiveInt = 16
) -> None:
    """Play one task along `graph`, in at most `max_steps` waves.

    The first wave is the nodes in `start`. In a wave every node sees what there was before it: agents are asked side
    by side, then actions step the environment one after another, in the order of the nodes. Then every edge is taken
    that leaves a node of the wave and whose condition holds. The next wave is the nodes with a taken edge into them,
    or, with `wait: all`, with all edges into them taken since they ran. The end is a done environment or an empty wave.

    Templates and conditions may use `problem` (as `reset` gave it), `history` (every action with its observation) and
    of every node its latest value by its name: what the role's parser made of the reply, "" when it is malformed, or
    the action's observation; `<node>.text` is the whole reply, `<node>.runs` how often the node ran. A graph that ends
    without an action steps the environment with "", which scores it as an empty reply.

    Raises:
        GraphError: the graph cannot be played.
    """
    drawn = read_graph(graph)
    values = drawn.blank() | {"problem": env.reset(task)}
    wave = [drawn.nodes[name] for name in dict.fromkeys(drawn.start)]
    taken: set[int] = set()
    acted = False
    for _ in range(max_steps):
        asked = [(node, node.agent) for node in wave if node.agent is not None]
        actions = [(node, node.action.fill(values)) for node in wave if node.action is not None]
        slots = [{slot: text.fill(values) for slot, text in node.slots.items()} for node, _ in asked]
        replies = await asyncio.gather(
            *(team.act(agent, **filled) for (_, agent), filled in zip(asked, slots, strict=True))
        )
        for (node, _), reply in zip(asked, replies, strict=True):
            _note(values, node, reply.value or "", reply.text)
        for node, action in actions:
            step = await env.step(action)
            acted = True
            values["history"] = f"{values['history']}{action}\n{step.observation}\n"
            _note(values, node, step.observation, step.observation)
            if step.done:
                return
        wave = _next(drawn, wave, values, taken)
        if not wave:
            break
    if not acted:
        await env.step("")


def _note(values: dict[str, str | int], node: GraphNode, value: str, text: str) -> None:
    runs = int(values[f"{node.name}.runs"]) + 1
    values |= {node.name: value, f"{node.name}.text": text, f"{node.name}.runs": runs}


def _next(graph: Graph, wave: Sequence[GraphNode], values: Mapping[str, object], taken: set[int]) -> list[GraphNode]:
    """The nodes of the next wave; edges into them are no longer in `taken`, the numbers of the edges taken so far."""
    ran = {node.name for node in wave}
    for number, edge in enumerate(graph.edges):
        if edge.source in ran and (edge.when is None or edge.when.holds(values)):
            taken.add(number)
    following = []
    for node in graph.nodes.values():
        into = {number for number, edge in enumerate(graph.edges) if edge.target == node.name}
        if into & taken and (node.wait == "any" or into <= taken):
            following.append(node)
            taken -= into
    return following
