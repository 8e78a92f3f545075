"""Trajectories in the terminal: one as a conversation, or a file's as a list."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from mcore_mas.credit.advantage_files import TurnAdvantages
from mcore_mas.reports.task_texts import TaskText, find_task_texts
from mcore_mas.reports.trajectory_files import AgentTools
from rollout.base.text import escape_text
from rollout.records.trajectory import (
    REPLAY_OUTCOME,
    Message,
    Status,
    ToolEvent,
    Trajectory,
    Turn,
    step_label,
)

_QUESTION_CHARS = 60  # of a task in a list


def plain_text(text: str, style: str = "") -> Text:
    """Return a text for the terminal, with its control characters as escapes."""
    return Text(escape_text(text), style=style)


def print_trajectory(
    trajectory: Trajectory,
    console: Console,
    advantages: TurnAdvantages,
    *,
    branches: bool = False,
    head: bool = True,
    agent_tools: AgentTools = MappingProxyType({}),
) -> None:
    """Print the turns of a trajectory with messages, tool calls, scores and advantages.

    Args:
        trajectory: trajectory to print.
        console: console to print to.
        advantages: advantages of turns.
        branches: True to print also the branches of a tree that did not lead to the outcome, and
            the alternatives of turns.
        head: True to print ids, status and outcome first.
        agent_tools: names of each agent's tools, which are printed where the agent first speaks.
    """
    if head:
        _print_head(trajectory, console)
    if trajectory.error:
        console.print(plain_text(trajectory.error, style="red"))

    path = {(turn.node, turn.index) for turn in trajectory.path}
    shown_indices: set[int] = set()
    shown_agents: set[str] = set()
    for event in trajectory.tools:
        if event.after_turn < 0:  # it was called before the first turn
            console.print(_tool_panel(event))
    turns = trajectory.turns if branches else trajectory.path
    for turn in turns:
        if turn.agent not in shown_agents and agent_tools.get(turn.agent):
            names = ", ".join(agent_tools[turn.agent])
            console.print(plain_text(f"tools of {turn.agent}: {names}", "dim"))
        shown_agents.add(turn.agent)
        # A turn, its alternatives and the turns of sibling branches have the same index and prompt,
        # so their messages are printed once.
        if turn.index not in shown_indices:
            for message in turn.new_messages:
                console.print(_message_panel(message, turn.agent))
        shown_indices.add(turn.index)

        colour = "dim"
        if (turn.node, turn.index) in path:
            colour = "green" if turn.valid else "red"
        advantage = advantages.get((trajectory.id, turn.node, turn.index))
        reply = Group(
            plain_text(turn.text),
            plain_text(_describe_turn(turn, advantage), style="dim"),
        )
        title = plain_text(f"{turn.index} {turn.agent}")
        console.print(Panel(reply, title=title, border_style=colour))
        for event in trajectory.tools:
            if (event.after_turn, event.node) == (turn.index, turn.node):
                console.print(_tool_panel(event))


def _print_head(trajectory: Trajectory, console: Console) -> None:
    outcome = "none" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    console.print(
        plain_text(
            f"{step_label(trajectory.step)}   task {trajectory.task_id}   sample {trajectory.sample}   "
            f"source {trajectory.source}   id {trajectory.id}"
        )
    )
    counts = _describe_turn_counts(trajectory)
    console.print(plain_text(f"{trajectory.status.value}   outcome {outcome}   {counts}"))


def _describe_turn_counts(trajectory: Trajectory) -> str:
    """Describe how many turns a trajectory has.

    In a tree, the turns on the path and those of the whole tree are counted. With replays, the turns
    and their alternatives are counted.
    """
    on_path = len(trajectory.path)
    total = len(trajectory.turns)
    if trajectory.leaf:
        return f"{on_path} turns on the path to {trajectory.leaf}, {total} in the tree"
    if on_path == total:
        return f"{total} turns"
    if any(REPLAY_OUTCOME in turn.scores for turn in trajectory.turns):
        return f"{on_path} turns, and {total - on_path} alternatives to them"
    # No branch of the tree led to the outcome.
    return f"{on_path} turns on the path, {total} in the tree"


def _message_panel(message: Message, agent: str) -> Panel:
    title = plain_text(f"{message.role} → {agent}")
    return Panel(plain_text(message.text), title=title, style="dim")


def _tool_panel(event: ToolEvent) -> Panel:
    title = plain_text(f"{event.tool}{' failed' if event.failed else ''}: {event.query}")
    colour = "red" if event.failed else "blue"
    return Panel(plain_text(event.result), title=title, border_style=colour)


def _describe_turn(turn: Turn, advantage: float | None) -> str:
    """Return a line with the turn's policy, tokens, scores, reward and advantage."""
    versions = f"v{turn.policy_version}"
    if turn.oldest_version < turn.policy_version:
        versions = f"v{turn.oldest_version} to {versions}"
    parts = [f"{turn.index} {turn.agent} ({turn.policy} {versions})"]
    if turn.node:
        # Alternatives of replayed turns have nodes too, but they are no branches of a tree.
        kind = "alternative" if REPLAY_OUTCOME in turn.scores else "branch"
        parts.append(f"{kind} {turn.node}")
    parts.append(f"{len(turn.completion_ids)} tokens, log p {sum(turn.logprobs):.2f}")
    parts += [f"{name} {value:g}" for name, value in turn.scores.items()]
    if turn.reward is not None:
        parts.append(f"reward {turn.reward:g}")
    if advantage is not None:
        parts.append(f"advantage {advantage:+.3g}")
    if turn.masked:
        parts.append("masked")
    if not turn.valid:
        parts.append("cut off" if turn.finish_reason == "length" else "malformed")
    return " · ".join(parts)


def print_trajectories(
    trajectories: Sequence[Trajectory],
    console: Console,
    advantages: TurnAdvantages,
    file: Path,
) -> None:
    """Print a line for each trajectory of a file, and the command that shows one of them.

    A line has the trajectory's number from 1, its task, sample, number of turns, outcome, mean
    reward, mean advantage and status. A task is shown by the beginning of its question, or by its
    id if `find_task_texts` finds no question.
    """
    task_ids = {trajectory.task_id for trajectory in trajectories}
    texts = find_task_texts(file, task_ids)
    rows = []
    for number, trajectory in enumerate(trajectories, start=1):
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        turn_advantages = [
            advantage
            for (trajectory_id, _, _), advantage in advantages.items()
            if trajectory_id == trajectory.id
        ]
        number_cells = [
            str(number),
            str(trajectory.sample),
            str(len(trajectory.turns)),
            _number_cell(trajectory.outcome),
            _number_cell(fmean(rewards) if rewards else None),
            _number_cell(fmean(turn_advantages) if turn_advantages else None),
        ]
        rows.append(number_cells)

    # In a narrow terminal, tasks are cut and statuses wrapped first, then headings are cut, and never numbers.
    headings = ("#", "sample", "turns", "outcome", "reward", "advantage")
    columns = [
        Column(heading, justify="right", no_wrap=True, min_width=max(map(len, column_cells)))
        for heading, column_cells in zip(headings, zip(*rows, strict=True), strict=True)
    ]
    table = Table(columns[0], "task", *columns[1:], "status", show_edge=False)
    for trajectory, number_cells in zip(trajectories, rows, strict=True):
        task = plain_text(_task_name(trajectory.task_id, texts))
        task.no_wrap = True
        task.overflow = "ellipsis"
        status = trajectory.status.value
        if trajectory.error:
            status = f"{status}: {trajectory.failure_reason}"
        table.add_row(
            number_cells[0],
            task,
            *number_cells[1:],
            plain_text(status),
            style="" if trajectory.status is Status.COMPLETED else "red",
        )
    console.print(table, crop=False)
    console.print(plain_text(f"{len(trajectories)} trajectories; one of them:", "dim"))
    # The command is not wrapped, so that it can be copied.
    console.print(
        plain_text(f"mcore-mas show {shlex.quote(str(file))} --index 1", "dim"), soft_wrap=True
    )


def _task_name(task_id: str, texts: Mapping[str, TaskText]) -> str:
    """Return the beginning of a task's question on one line, or else its id."""
    if task_id not in texts:
        return task_id
    return " ".join(texts[task_id].question.split())[:_QUESTION_CHARS]


def _number_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
