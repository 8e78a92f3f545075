"""Credit made visible: who was compared with whom, and what every turn got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_mas.credit.assign import assess, columns, estimate
from mcore_mas.credit.samples import CreditError, Sample, to_samples
from mcore_mas.equations.advantages import ESTIMATORS
from mcore_mas.equations.turns import GroupStatistics
from rollout.config.sections import Choice
from rollout.records.trajectory import Group, Task, Trajectory, read_trajectories


def explain(file: Path, name: str, options: Mapping[str, Any], task: str | None, limit: int, console: Console) -> None:
    """Print the credit that estimator `name` gives the turns of `file`, task by task.

    Args:
        file: trajectories with rewards: train/trajectories/step_*.parquet of a run.
        options: of the estimator.
        task: only this task's turns.
        limit: at most so many tasks.

    Raises:
        RecordError: the file is no file of trajectories.
        CreditError: a turn has no reward or the estimator lacks what it needs, or no turn is of `task`.
        ValueError: the estimator is unknown, or has no such option.
    """
    rule = Choice(name=name, options=dict(options))
    rule.check("advantage", ESTIMATORS)
    samples = to_samples(groups_of(read_trajectories(file)))
    samples = estimate(samples, {sample.agent: rule for sample in samples})
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    if task is not None and task not in tasks:
        raise CreditError(
            f"{file}: no completed turn is of task '{task}'; the first task is '{(tasks or ['none'])[0]}'"
        )
    shown = [task] if task is not None else tasks[:limit]
    groups = assess(columns(samples), rule).groups
    for one in shown:
        rows = [i for i, sample in enumerate(samples) if sample.task == one]
        console.print(Text(f"\ntask {one}   {name}{_said(options)}", style="bold"))
        for label, group in groups.items():
            alike, vote = ", ".join(group.grouping.peers), ", ".join(group.grouping.vote)
            console.print(Text(f"{label}: turns alike in {alike}; one vote per {vote}", style="italic"))
            console.print(_groups_table(group, samples, rows))
        console.print(_turns_table(groups, samples, rows))
    if len(shown) < len(tasks):
        console.print(Text(f"{len(shown)} of {len(tasks)} tasks; --task and --limit show others", style="dim"))


def groups_of(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Recorded trajectories by task; of the task itself only its id is known."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task_id, []).append(trajectory)
    return [
        Group(
            task=Task(id=task, prompt="", answers=(), env="", source=own[0].source, split=""), trajectories=tuple(own)
        )
        for task, own in by_task.items()
    ]


def _said(options: Mapping[str, Any]) -> str:
    return "".join(f" {key}={value}" for key, value in options.items())


def _groups_table(statistics: GroupStatistics, samples: Sequence[Sample], rows: Sequence[int]) -> Table:
    """One line per peer group: its votes, each once, with their mean and deviation."""
    table = Table(show_edge=False)
    for heading in ("group", "votes", "n", "μ", "σ"):
        table.add_column(heading, justify="left" if heading in ("group", "votes") else "right")
    seen: dict[int, list[int]] = {}
    for i in rows:
        group = int(statistics.group_of[statistics.vote[i]])
        seen.setdefault(group, []).append(i)
    for own in seen.values():
        first = own[0]
        votes = {int(statistics.vote[i]): f"{float(statistics.own[i]):g}" for i in own}
        table.add_row(
            _named(samples[first], statistics.grouping.peers),
            ", ".join(votes.values()),
            str(int(statistics.size[first])),
            f"{float(statistics.mean[first]):.4g}",
            f"{float(statistics.std[first]):.4g}",
        )
    return table


def _turns_table(groups: Mapping[str, GroupStatistics], samples: Sequence[Sample], rows: Sequence[int]) -> Table:
    """One line per turn: its reward, the vote it is part of in each comparison, and its advantage."""
    table = Table(show_edge=False)
    for heading in ("trajectory", "node", "turn", "agent", "reward", *(f"vote ({label})" for label in groups)):
        table.add_column(heading, justify="right" if heading in ("turn", "reward") or "vote" in heading else "left")
    table.add_column("advantage", justify="right")
    for i in rows:
        sample = samples[i]
        advantages = sample.advantages or (0.0,)
        low, high = min(advantages), max(advantages)
        table.add_row(
            sample.trajectory,
            sample.node,
            str(sample.turn),
            sample.agent,
            f"{sample.reward:g}",
            *(f"{float(group.own[i]):g}" for group in groups.values()),
            f"{low:+.4f}" if low == high else f"{low:+.4f} … {high:+.4f}",
        )
    return table


def _named(sample: Sample, peers: Sequence[str]) -> str:
    parts = []
    for column in peers:
        value = sample.node.rpartition(".")[0] or "root" if column == "parent" else getattr(sample, column)
        if column != "task":  # the task is in the title
            parts.append(f"{column} {value}")
    return ", ".join(parts) or "all"
