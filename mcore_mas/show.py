"""A trajectory as a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from rollout.records import RecordError, Trajectory, Turn, read_trajectories


def show(file: Path, index: int = 0, trajectory_id: str | None = None) -> None:
    """Print one trajectory of `file`: the `index`-th, or the one with `trajectory_id`.

    Raises:
        RecordError: the file is no file of trajectories, or has no such trajectory.
    """
    trajectories = read_trajectories(file)
    if trajectory_id is not None:
        index = next((i for i, t in enumerate(trajectories) if t.id == trajectory_id), -1)
        if index < 0:
            raise RecordError(f"{file}: no trajectory '{trajectory_id}'; the first is '{trajectories[0].id}'")
    if not 0 <= index < len(trajectories):
        raise RecordError(f"{file}: no trajectory {index}; it holds {len(trajectories)}, counted from 0")
    render(trajectories[index], Console(highlight=False))


def render(trajectory: Trajectory, console: Console) -> None:
    """Print `trajectory` to `console`."""
    outcome = "none" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    console.print(Text(f"trajectory {trajectory.id}   task {trajectory.task_id}   source {trajectory.source}"))
    console.print(Text(f"{trajectory.status.value}   outcome {outcome}   {len(trajectory.turns)} turns"))
    if trajectory.error:
        console.print(Text(trajectory.error, style="red"))
    for turn in trajectory.turns:
        for message in turn.messages:
            console.print(Panel(Text(message.content), title=f"{message.role} → {turn.agent}", style="dim"))
        console.print(Panel(Text(turn.text), title=_title(turn), border_style="green" if turn.valid else "red"))
        for event in trajectory.tools:
            if event.after_turn == turn.index:
                console.print(Panel(Text(event.result), title=f"{event.tool}: {event.query}", border_style="blue"))


def _title(turn: Turn) -> str:
    reward = "" if turn.reward is None else f" · reward {turn.reward:g}"
    malformed = "" if turn.valid else " · malformed"
    tokens = f"{len(turn.completion_ids)} tokens, log p {sum(turn.logprobs):.2f}"
    return f"{turn.index} {turn.agent} ({turn.policy} v{turn.policy_version}) · {tokens}{reward}{malformed}"
