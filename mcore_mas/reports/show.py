"""A trajectory as a conversation: in the terminal, or as a web page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.assign import by_place, estimate, keep
from mcore_mas.credit.explain import groups_of
from mcore_mas.credit.samples import CreditError, to_samples
from mcore_mas.reports.pages import Advantages, trajectory_page
from rollout.base.files import write_text
from rollout.records.trajectory import RecordError, Trajectory, Turn, read_trajectories


def show(
    file: Path,
    index: int = 0,
    trajectory_id: str | None = None,
    *,
    branches: bool = False,
    html: Path | None = None,
) -> None:
    """Print one trajectory of `file`, the `index`-th or the one with `trajectory_id`, or write it to the page `html`.

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
    advantages = advantages_of(file, trajectories)
    if html is not None:
        write_text(html, trajectory_page(trajectories[index], advantages))
        return
    render(trajectories[index], Console(highlight=False), advantages, branches=branches)


def advantages_of(file: Path, trajectories: Sequence[Trajectory]) -> Advantages:
    """What the estimators of the run that `file` belongs to give its turns; {} where they cannot.

    They cannot of an evaluation, which has no rewards, or when they need what is not in the file: a critic's values or
    what a KL penalty took. Under a filter, turns that were left out have none.
    """
    try:
        config = RunConfig.load(file.resolve().parents[2] / "config.yaml")
        samples = to_samples(groups_of(trajectories))
        if config.filter is not None:
            samples = keep(samples, config.filter)
        kl = config.loss.kl
        if not samples or (kl.coef and kl.where == "reward"):
            return {}
        return by_place(estimate(samples, {name: config.advantage_of(name) for name in config.agents}))
    except (ConfigError, CreditError, IndexError):
        return {}


def render(trajectory: Trajectory, console: Console, advantages: Advantages, *, branches: bool = False) -> None:
    """Print the line that led to the outcome to `console`; of a tree, with `branches`, also what did not go on."""
    outcome = "none" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    console.print(Text(f"trajectory {trajectory.id}   task {trajectory.task_id}   source {trajectory.source}"))
    console.print(Text(f"{trajectory.status.value}   outcome {outcome}   {_size(trajectory)}"))
    if trajectory.error:
        console.print(Text(trajectory.error, style="red"))
    turns = trajectory.turns if branches else trajectory.path
    path = {(turn.node, turn.index) for turn in trajectory.path}
    seen = set()
    for turn in turns:
        if turn.index not in seen:  # branches were asked the same
            for message in turn.messages:
                console.print(Panel(Text(message.content), title=Text(f"{message.role} → {turn.agent}"), style="dim"))
        seen.add(turn.index)
        colour = ("green" if turn.valid else "red") if (turn.node, turn.index) in path else "dim"
        advantage = advantages.get((trajectory.id, turn.node, turn.index))
        console.print(Panel(Text(turn.text), title=_title(turn, advantage), border_style=colour))
        for event in trajectory.tools:
            if (event.after_turn, event.node) == (turn.index, turn.node):
                title = Text(f"{event.tool}{' failed' if event.failed else ''}: {event.query}")
                console.print(Panel(Text(event.result), title=title, border_style="red" if event.failed else "blue"))


def _size(trajectory: Trajectory) -> str:
    if not trajectory.leaf:
        return f"{len(trajectory.turns)} turns"
    return f"{len(trajectory.path)} turns on the path to {trajectory.leaf}, {len(trajectory.turns)} in the tree"


def _title(turn: Turn, advantage: float | None) -> Text:
    oldest = f"v{turn.oldest_version} to " if turn.oldest_version < turn.policy_version else ""
    parts = [f"{turn.index} {turn.agent} ({turn.policy} {oldest}v{turn.policy_version})"]
    if turn.node:
        parts.append(f"branch {turn.node}")
    parts.append(f"{len(turn.completion_ids)} tokens, log p {sum(turn.logprobs):.2f}")
    parts += [f"{name} {value:g}" for name, value in turn.scores.items()]
    if turn.reward is not None:
        parts.append(f"reward {turn.reward:g}")
    if advantage is not None:
        parts.append(f"advantage {advantage:+.3g}")
    if turn.masked:
        parts.append("masked")
    if not turn.valid:
        parts.append("malformed")
    return Text(" · ".join(parts))
