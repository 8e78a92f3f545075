"""Trajectories and their credit in the terminal: who said what to whom, who was compared with whom."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.console import Group as Lines
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.assign import assess, assessments, columns, estimate, keep, mean_advantages
from mcore_mas.credit.samples import CreditError, Sample, to_samples
from mcore_mas.equations.turns import GroupStatistics
from mcore_mas.reports.pages import PeerGroup, TurnAdvantages, TurnGroups
from rollout.base.error_lines import error_line
from rollout.base.text import escape_text
from rollout.records.files import read_trajectories
from rollout.records.grouping import group_pairs, group_trajectories
from rollout.records.trajectory import Status, Trajectory, Turn


def plain(text: str, style: str = "") -> Text:
    """A text for the terminal, in which nothing is a command to it."""
    return Text(escape_text(text), style=style)


def credit_of(file: Path, trajectories: Sequence[Trajectory]) -> tuple[TurnAdvantages, TurnGroups]:
    """What the estimators of the run that `file` belongs to give its turns, and who was compared; {} where they cannot.

    They cannot of an evaluation, which has no rewards, or when they need what is not in the file: a critic's values or
    what a KL penalty took. Under a filter, turns that were left out have none.
    """
    try:
        config = RunConfig.load(file.resolve().parents[2] / "config.yaml")
        samples = to_samples(group_trajectories(trajectories))
        if config.filter is not None:
            samples = keep(samples, config.filter)
        kl = config.loss.kl
        if not samples or (kl.coef and kl.where == "reward"):
            return {}, {}
        rules = {name: config.advantage_of(name) for name in config.agents}
        advantages = mean_advantages(estimate(samples, rules))
        return advantages, _compared(samples, rules, advantages)
    except (ConfigError, CreditError, IndexError):
        return {}, {}


def _compared(
    samples: Sequence[Sample], rules: Mapping[str, AdvantageConfig], advantages: TurnAdvantages
) -> TurnGroups:
    """The groups in which the estimator of a turn's agent compared it with others of its task."""
    found: dict[tuple[str, str, int], list[PeerGroup]] = {}
    for rule, seen, _, made in assessments(samples, rules):
        for label, all_turns in made.groups.items():
            groups: dict[tuple[str, int], PeerGroup] = {}
            alike, one_vote = all_turns.grouping.peers, all_turns.grouping.vote
            for place, i in enumerate(seen):
                sample, number = samples[i], int(all_turns.vote_group[all_turns.vote[place]])
                size, mean, std = (
                    float(x[place]) for x in (all_turns.size, all_turns.mean, all_turns.std)
                )
                group = groups.setdefault(
                    (sample.task, number),
                    PeerGroup(label, alike, one_vote, int(size), mean, std, []),
                )
                group.members.append(
                    (sample, float(all_turns.score[place]), advantages.get(sample.id))
                )
                if rules[sample.agent] == rule:
                    found.setdefault(sample.id, []).append(group)
    return found


def print_trajectory(
    trajectory: Trajectory,
    console: Console,
    advantages: TurnAdvantages,
    *,
    branches: bool = False,
    head: bool = True,
) -> None:
    """Print the line that led to the outcome to `console`.

    Args:
        branches: of a tree, also what did not go on.
        head: begin with ids, status and outcome.
    """
    if head:
        outcome = "none" if trajectory.outcome is None else f"{trajectory.outcome:g}"
        console.print(
            plain(
                f"trajectory {trajectory.id}   task {trajectory.task_id}   source {trajectory.source}"
            )
        )
        size = f"{len(trajectory.turns)} turns"
        if trajectory.leaf:
            size = f"{len(trajectory.path)} turns on the path to {trajectory.leaf}, {len(trajectory.turns)} in the tree"
        console.print(plain(f"{trajectory.status.value}   outcome {outcome}   {size}"))
    if trajectory.error:
        console.print(plain(trajectory.error, style="red"))
    turns = trajectory.turns if branches else trajectory.path
    path = {(turn.node, turn.index) for turn in trajectory.path}
    seen = set()
    for turn in turns:
        if turn.index not in seen:  # branches were asked the same
            for message in turn.news:
                console.print(
                    Panel(
                        plain(message.text),
                        title=plain(f"{message.role} → {turn.agent}"),
                        style="dim",
                    )
                )
        seen.add(turn.index)
        colour = ("green" if turn.valid else "red") if (turn.node, turn.index) in path else "dim"
        advantage = advantages.get((trajectory.id, turn.node, turn.index))
        said = Lines(plain(turn.text), plain(_facts(turn, advantage), style="dim"))
        console.print(Panel(said, title=plain(f"{turn.index} {turn.agent}"), border_style=colour))
        for event in trajectory.tools:
            if (event.after_turn, event.node) == (turn.index, turn.node):
                title = plain(f"{event.tool}{' failed' if event.failed else ''}: {event.query}")
                console.print(
                    Panel(
                        plain(event.result),
                        title=title,
                        border_style="red" if event.failed else "blue",
                    )
                )


def _facts(turn: Turn, advantage: float | None) -> str:
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
        parts.append("cut off" if turn.finish_reason == "length" else "malformed")
    return " · ".join(parts)


def print_trajectories(
    trajectories: Sequence[Trajectory], console: Console, advantages: TurnAdvantages, file: Path
) -> None:
    """Print a line for each trajectory of a file: its number and task, how it ended, its outcome and mean reward."""
    headings = ("#", "sample", "turns", "outcome", "reward", "advantage")
    first, *rest = (Column(heading, justify="right") for heading in headings)
    table = Table(first, Column("task", overflow="fold"), *rest, "status", show_edge=False)
    for number, one in enumerate(trajectories):
        rewards = [turn.reward for turn in one.turns if turn.reward is not None]
        credit = [value for (of, _, _), value in advantages.items() if of == one.id]
        numbers = (
            one.outcome,
            fmean(rewards) if rewards else None,
            fmean(credit) if credit else None,
        )
        style = "" if one.status is Status.COMPLETED else "red"
        ended = one.status.value if not one.error else f"{one.status.value}: {one.trouble}"
        cells = [
            str(one.sample),
            str(len(one.turns)),
            *("" if n is None else f"{n:.3g}" for n in numbers),
        ]
        table.add_row(str(number), plain(one.task_id), *cells, plain(ended), style=style)
    console.print(table)
    console.print(plain(f"{len(trajectories)} trajectories; one of them:", "dim"))
    console.print(
        plain(f"mcore-mas show {file} --index 0", "dim"), soft_wrap=True
    )  # a command is copied


def print_credit(
    file: Path,
    name: str,
    options: Mapping[str, Any],
    task: str | None,
    limit: int,
    console: Console,
) -> None:
    """Print the credit that estimator `name` gives the turns of `file`, task by task.

    Args:
        file: trajectories with rewards: train/trajectories/step_*.parquet of a run.
        options: of the estimator.
        task: only this task's turns.
        limit: at most so many tasks.

    Raises:
        RecordError: the file is no file of trajectories.
        CreditError: the estimator is unknown, has no such option, or lacks what it needs; a turn has no reward; or no
            turn is of `task`.
    """
    try:
        rule = AdvantageConfig(name=name, options=dict(options))
    except ValidationError as error:
        values = {"name": name, "options": options}
        line = error_line(error, AdvantageConfig, values)
        raise CreditError(line.removeprefix("name: ")) from error
    samples = to_samples(group_trajectories(read_trajectories(file)))
    samples = estimate(samples, {sample.agent: rule for sample in samples})
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    if task is not None and task not in tasks:
        raise CreditError(
            f"{file}: no completed turn is of task '{task}'; the first task is '{(tasks or ['none'])[0]}'"
        )
    chosen = "".join(f" {key}={value}" for key, value in options.items())
    shown = [task] if task is not None else tasks[:limit]
    groups = assess(columns(samples), rule).groups
    for one in shown:
        rows = [i for i, sample in enumerate(samples) if sample.task == one]
        console.print(plain(f"\ntask {one}   {name}{chosen}", style="bold"))
        for label, group in groups.items():
            alike, vote = ", ".join(group.grouping.peers), ", ".join(group.grouping.vote)
            console.print(
                plain(f"{label}: turns alike in {alike}; one vote per {vote}", style="italic")
            )
            console.print(_groups_table(group, samples, rows))
        console.print(_turns_table(groups, samples, rows))
    if len(shown) < len(tasks):
        console.print(
            plain(
                f"{len(shown)} of {len(tasks)} tasks; --task and --limit show others", style="dim"
            )
        )


def _groups_table(
    statistics: GroupStatistics, samples: Sequence[Sample], rows: Sequence[int]
) -> Table:
    """One line per peer group: its votes, each once, with their mean and deviation."""
    numbers = [Column(heading, justify="right") for heading in ("n", "μ", "σ")]
    table = Table("group", "votes", *numbers, show_edge=False)
    groups = group_pairs((int(statistics.vote_group[statistics.vote[i]]), i) for i in rows)
    for own in groups.values():
        first = own[0]
        votes = {int(statistics.vote[i]): f"{float(statistics.score[i]):g}" for i in own}
        table.add_row(
            _group_name(samples[first], statistics.grouping.peers),
            ", ".join(votes.values()),
            str(int(statistics.size[first])),
            f"{float(statistics.mean[first]):.4g}",
            f"{float(statistics.std[first]):.4g}",
        )
    return table


def _turns_table(
    groups: Mapping[str, GroupStatistics], samples: Sequence[Sample], rows: Sequence[int]
) -> Table:
    """One line per turn: its reward, the vote it is part of in each comparison, and its advantage."""
    headings = ("turn", "reward", *(f"vote ({label})" for label in groups), "advantage")
    turn, *numbers = (Column(heading, justify="right") for heading in headings)
    table = Table("sample", "node", turn, "agent", *numbers, show_edge=False)
    for sample, i in ((samples[i], i) for i in rows):
        low, high = min(sample.advantages or (0.0,)), max(sample.advantages or (0.0,))
        table.add_row(
            sample.trajectory.rpartition("/")[2],  # the task is in the title
            sample.node,
            str(sample.turn),
            sample.agent,
            f"{sample.reward:g}",
            *(f"{float(group.score[i]):g}" for group in groups.values()),
            f"{low:+.4f}" if low == high else f"{low:+.4f} … {high:+.4f}",
        )
    return table


def _group_name(sample: Sample, peers: Sequence[str]) -> str:
    parts = []
    for column in peers:
        value = (
            sample.node.rpartition(".")[0] or "root"
            if column == "parent"
            else getattr(sample, column)
        )
        if column != "task":  # the task is in the title
            parts.append(f"{column} {value}")
    return ", ".join(parts) or "all"
