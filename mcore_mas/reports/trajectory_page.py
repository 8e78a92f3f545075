"""The web page of one trajectory: who said what, tools, rewards, and credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.reports.page_templates import render_page
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import REPLAY_OUTCOME, Trajectory

if TYPE_CHECKING:  # importing it would load torch
    from mcore_mas.credit.samples import Sample
    from mcore_mas.reports.task_texts import TaskText

_COLOURS = 8  # number of colours in templates/colours.css.jinja

# Text and log-probability of each sampled token of a turn, by node and turn number.
TurnTokens = Mapping[tuple[str, int], Sequence[tuple[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One turn of a peer group."""

    sample: Sample
    vote_score: float  # score of the vote that this turn belongs to
    advantage: float | None  # mean over the tokens that carry loss; None if no token does


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGroup:
    """The turns of one task in a group of turns that an estimator compared with one another."""

    label: str  # name of the group in `Advantages.groups`, such as "peers"
    peer_columns: tuple[str, ...]  # columns in which the turns are equal
    vote_columns: tuple[str, ...]  # columns in which turns of one vote are equal
    size: int  # number of votes in the group, including those of other tasks
    mean: float  # of all votes in the group
    std: float  # of all votes in the group
    members: list[GroupMember]  # turns of this task


# Peer groups of each turn, by trajectory, node and turn number.
TurnGroups = Mapping[tuple[str, str, int], Sequence[PeerGroup]]
_NO_TOKENS: TurnTokens = MappingProxyType({})
_NO_GROUPS: TurnGroups = MappingProxyType({})


def trajectory_page(
    trajectory: Trajectory,
    advantages: TurnAdvantages,
    tokens: TurnTokens = _NO_TOKENS,
    groups: TurnGroups = _NO_GROUPS,
    *,
    task: TaskText | None = None,
    agent_order: Sequence[str] = (),
) -> str:
    """Return the page of a trajectory as HTML.

    In a tree, branches that did not lead to the outcome are folded, where they left the path. The
    alternatives of a turn are folded after it.

    Args:
        trajectory: trajectory to show.
        advantages: advantages of turns, also of other trajectories.
        tokens: tokens of turns, which are shaded by log-probability or by the turn's advantage.
        groups: peer groups of turns, also of other trajectories.
        task: question and right answers of the trajectory's task, for the head of the page.
        agent_order: agents of the run, so that an agent has the same colour on all pages.
    """
    turns_by_agent = group_pairs((turn.agent, turn) for turn in trajectory.turns)
    turns_by_node = group_pairs((turn.node, turn) for turn in trajectory.turns)
    tools_by_turn = group_pairs(
        ((event.node, event.after_turn), event) for event in trajectory.tools
    )
    turn_advantages = {
        (node, turn): advantage
        for (trajectory_id, node, turn), advantage in advantages.items()
        if trajectory_id == trajectory.id
    }
    ordered_agents = dict.fromkeys([*agent_order, *turns_by_agent])
    return render_page(
        "trajectory.html.jinja",
        trajectory=trajectory,
        task=task,
        agents=turns_by_agent,
        colours={agent: f"var(--c{i % _COLOURS})" for i, agent in enumerate(ordered_agents)},
        nodes=turns_by_node,
        alternatives=group_pairs(
            (turn.index, turn) for turn in trajectory.turns if REPLAY_OUTCOME in turn.scores
        ),
        branches_by_path_node=_branches_by_path_node(trajectory),
        tools=tools_by_turn,
        advantages=turn_advantages,
        largest_advantage=max(map(abs, turn_advantages.values()), default=0.0),
        tokens=tokens,
        groups=groups,
    )


def _branches_by_path_node(trajectory: Trajectory) -> dict[str, list[list[str]]]:
    """Return the branches that did not lead to the outcome, by the node after which the page shows them.

    A branch is a list of nodes: its root, which is its first node off the path, and the nodes below
    the root. It is shown after the root's sibling on the path. If the root has none, because the path
    ends above it, the branch is shown after the last node of the path.

    Returns:
        Branches by node, with a key for every node on the path. Without a tree, or if no node of the
        tree led to the outcome, the only key is "".
    """
    path = list(dict.fromkeys(turn.node for turn in trajectory.path)) or [""]
    branches: dict[str, dict[str, list[str]]] = {node: {} for node in path}  # by path node and root
    for turn in trajectory.turns:
        # Alternatives of replayed turns have nodes too, but they are no branches of a tree.
        if turn.node in path or REPLAY_OUTCOME in turn.scores:
            continue
        root = _branch_root(turn.node, path)
        siblings = [node for node in path if node and _parent(node) == _parent(root)]
        path_node = siblings[0] if siblings else path[-1]
        nodes = branches[path_node].setdefault(root, [])
        if turn.node not in nodes:
            nodes.append(turn.node)
    return {path_node: list(by_root.values()) for path_node, by_root in branches.items()}


def _branch_root(node: str, path: Sequence[str]) -> str:
    """Return the root of a node's branch: the highest of the node and its ancestors that is off the path."""
    root = node
    while _parent(root) and _parent(root) not in path:
        root = _parent(root)
    return root


def _parent(node: str) -> str:
    """Return the node above a node, such as "0.2" of "0.2.1"; "" if there is none."""
    return node.rpartition(".")[0]
