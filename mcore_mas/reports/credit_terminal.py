"""Credit in the terminal: peer groups with their votes, and the advantage of each turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Column, Table

from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.credit.assign import (
    AppliedEstimator,
    add_advantages,
    apply_estimators,
    filter_samples,
)
from mcore_mas.credit.samples import CreditError, Sample, to_samples
from mcore_mas.equations.turns import Grouping, GroupStatistics
from mcore_mas.reports.trajectory_terminal import plain_text
from rollout.base.error_lines import error_line
from rollout.base.nested import merged
from rollout.base.yaml_files import read_yaml
from rollout.records.files import read_trajectories
from rollout.records.grouping import group_pairs, group_trajectories


class _AgentSection(BaseModel):
    advantage: AdvantageConfig | None = None


class _KLSection(BaseModel):
    coef: float = 0.0
    where: str = "loss"


class _LossSection(BaseModel):
    kl: _KLSection = _KLSection()


class _OverridesSection(BaseModel):
    loss: dict[str, Any] = {}


class _PolicySection(BaseModel):
    overrides: _OverridesSection = _OverridesSection()


class _CreditSections(BaseModel):
    """Sections of a run's config that decide the advantages of its turns.

    Other sections are ignored, because the whole `RunConfig` takes long to import.
    """

    advantage: AdvantageConfig
    agents: dict[str, _AgentSection]
    filter: FilterConfig | None = None
    loss: _LossSection = _LossSection()
    policies: dict[str, _PolicySection]

    @property
    def penalises_rewards(self) -> bool:
        """True if the rewards of a policy get KL penalties."""
        for policy in self.policies.values():
            loss = merged(self.loss.model_dump(), policy.overrides.loss)
            kl = _LossSection.model_validate(loss).kl
            if kl.coef and kl.where == "reward":
                return True
        return False


def print_credit(
    file: Path,
    name: str | None,
    options: Mapping[str, Any],
    task: str | None,
    limit: int,
    console: Console,
) -> None:
    """Print the credit that an estimator gives the turns of a file, task by task.

    The run's own estimators may differ between agents. Then each estimator has its own tables.

    Args:
        file: trajectories with rewards: train/trajectories/step_*.parquet of a run.
        name: name of the estimator for all agents; None: apply the filter and the estimators that the
            config of the file's run has.
        options: options of the estimator; without a name, they take precedence over those of the
            config.
        task: print only this task's turns.
        limit: maximum number of tasks to print if `task` is None.
        console: console to print to.

    Raises:
        RecordError: the file is not a file of trajectories.
        CreditError: the estimator is unknown, has no such option, or lacks what it needs; a turn
            has no reward; no turn is completed, passes the filter, or is of `task`; there is neither
            a name nor a config; or the config cannot be read.
    """
    trajectories = read_trajectories(file)
    samples = to_samples(group_trajectories(trajectories))
    if not samples:
        raise CreditError(
            f"{file}: none of its {len(trajectories)} trajectories has a completed turn, so there is no credit to "
            f"explain; `mcore-mas show {file}` shows why they failed"
        )
    if name is not None:
        estimator = _parse_estimator(name, options)
        estimators = {sample.agent: estimator for sample in samples}
    else:
        sections = _sections_of_run(file)
        estimators = _estimators_of_run(sections, options)
        if sections.filter is not None:
            all_tasks = {sample.task for sample in samples}
            samples = filter_samples(samples, sections.filter)
            dropped_tasks = all_tasks - {sample.task for sample in samples}
            if not samples or task in dropped_tasks:
                turns = f"task '{task}'" if task in dropped_tasks else "these trajectories"
                raise CreditError(
                    f"{file}: the run's filter drops all turns of {turns}, so none has an advantage; name "
                    "an estimator with --advantage to see them without the filter"
                )
        if sections.penalises_rewards:
            text = "without the KL penalties of the rewards, which the file does not have"
            console.print(plain_text(text, style="dim"))
    try:
        samples = add_advantages(samples, estimators)
    except CreditError as error:
        if name is not None:
            raise
        raise CreditError(f"{error}; name another estimator with --advantage") from error

    tasks = list(dict.fromkeys(sample.task for sample in samples))
    if task is not None and task not in tasks:
        raise CreditError(
            f"{file}: no completed turn is of task '{task}'; the first task is '{tasks[0]}'"
        )

    shown_tasks = [task] if task is not None else tasks[:limit]
    applied_estimators = list(apply_estimators(samples, estimators))
    for shown_task in shown_tasks:
        for applied in applied_estimators:
            _print_task(shown_task, applied, samples, estimators, console)

    if len(shown_tasks) < len(tasks):
        text = f"{len(shown_tasks)} of {len(tasks)} tasks; --task and --limit show others"
        console.print(plain_text(text, style="dim"))


def _sections_of_run(file: Path) -> _CreditSections:
    """Read the sections of a run's config that decide advantages.

    Args:
        file: file of trajectories, in the folder train/trajectories of the run.

    Raises:
        CreditError: the run has no config, or it is damaged or cannot be read.
    """
    config_file = file.resolve().parent.parent.parent / "config.yaml"
    if not config_file.is_file():
        raise CreditError(
            f"{file}: its run's config is not at {config_file}, so its estimator is unknown; "
            "name one with --advantage"
        )
    try:
        values = read_yaml(config_file)
    except OSError as error:
        raise CreditError(
            f"{config_file}: cannot be read ({error.strerror}); check its permissions, or name an "
            "estimator with --advantage"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise CreditError(f"{config_file}: not YAML ({message}); make it again") from error
    try:
        return _CreditSections.model_validate(values)
    except ValidationError as error:
        raise CreditError(f"{config_file}: {error_line(error, _CreditSections, values)}") from error


def _estimators_of_run(
    sections: _CreditSections, options: Mapping[str, Any]
) -> dict[str, AdvantageConfig]:
    """Return the estimator of each agent of a run; `options` take precedence over those of the config."""
    estimators = {}
    for agent, section in sections.agents.items():
        estimator = section.advantage or sections.advantage
        estimators[agent] = _parse_estimator(estimator.name, {**estimator.options, **options})
    return estimators


def _print_task(
    task: str,
    applied: AppliedEstimator,
    samples: Sequence[Sample],
    estimators: Mapping[str, AdvantageConfig],
    console: Console,
) -> None:
    """Print how an estimator compared the turns of a task, and the advantages that it gave.

    Advantages are printed for the agents that have this estimator; the peer groups may also hold
    turns of other agents. Nothing is printed if no agent with this estimator has a turn of the task.
    """
    compared = [samples[index] for index in applied.indices]
    rows = [i for i, sample in enumerate(compared) if sample.task == task]
    credited_rows = [i for i in rows if estimators[compared[i].agent] == applied.estimator]
    if not credited_rows:
        return
    name = applied.estimator.name
    shown_options = "".join(f" {key}={value}" for key, value in applied.estimator.options.items())
    console.print(plain_text(f"\ntask {task}   {name}{shown_options}", style="bold"))
    groups = applied.advantages.groups
    for label, statistics in groups.items():
        text = f"{label}: {_describe_grouping(statistics.grouping)}"
        console.print(plain_text(text, style="italic"))
        console.print(_groups_table(statistics, compared, rows))
    console.print(_turns_table(groups, compared, credited_rows))


def _describe_grouping(grouping: Grouping) -> str:
    """Describe which turns an estimator compares with each other, and which of these share a vote."""
    compared = "all turns"
    if grouping.peer_columns:
        compared = f"turns of the same {_enumeration(grouping.peer_columns)}"
    voter = ", ".join(grouping.vote_columns)
    # These columns identify a turn.
    if set(grouping.vote_columns) == {"trajectory", "node", "turn"}:
        voter = "turn"
    return f"compares {compared}; each {voter} has one vote"


def _enumeration(words: Sequence[str]) -> str:
    """Join words, such as "task, agent and turn"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _parse_estimator(name: str, options: Mapping[str, Any]) -> AdvantageConfig:
    try:
        return AdvantageConfig(name=name, options=dict(options))
    except ValidationError as error:
        line = error_line(error, AdvantageConfig, {"name": name, "options": options})
        raise CreditError(line.removeprefix("name: ")) from error


def _groups_table(
    statistics: GroupStatistics, samples: Sequence[Sample], rows: Sequence[int]
) -> Table:
    """Return a table with a line for each peer group of a task's turns.

    A line has the votes of these turns, and the number, mean and deviation of all votes in the group.
    A group may also have votes of other tasks.

    Args:
        statistics: votes of the groups.
        samples: turns that were compared.
        rows: indices of the task's turns.
    """
    table = Table(
        "group",
        "votes",
        *(Column(heading, justify="right") for heading in ("n", "μ", "σ")),
        show_edge=False,
    )
    rows_by_group = group_pairs(
        (int(statistics.vote_group[statistics.vote_index[i]]), i) for i in rows
    )
    for group_rows in rows_by_group.values():
        first = group_rows[0]
        # By index of the vote, because several turns may share a vote.
        votes = {
            int(statistics.vote_index[i]): f"{float(statistics.score[i]):g}" for i in group_rows
        }
        table.add_row(
            _group_name(samples[first], statistics.grouping.peer_columns),
            ", ".join(votes.values()),
            str(int(statistics.size[first])),
            f"{float(statistics.mean[first]):.4g}",
            f"{float(statistics.std[first]):.4g}",
        )
    return table


def _turns_table(
    groups: Mapping[str, GroupStatistics], samples: Sequence[Sample], rows: Sequence[int]
) -> Table:
    """Return a table with a line per turn: its reward, its vote in each group, its advantage.

    If turns have them, further columns show the score "removal" and how alternatives were continued.

    Args:
        groups: statistics of the groups in which the turns were compared, by label.
        samples: turns that were compared, with their advantages.
        rows: indices of the turns that are shown.
    """
    headings = ["reward", *(f"vote ({label})" for label in groups), "advantage"]
    has_removal = any("removal" in sample.scores for sample in samples)
    if has_removal:
        headings.append("removal")
    table = Table(
        "sample",
        "node",
        Column("turn", justify="right"),
        "agent",
        *(Column(heading, justify="right") for heading in headings),
        show_edge=False,
    )
    has_replays = any(sample.is_alternative for sample in samples)
    if has_replays:
        table.add_column("later turns")

    for row in rows:
        sample = samples[row]
        advantages = sample.advantages or (0.0,)  # by token; a masked turn has none
        low, high = min(advantages), max(advantages)
        cells = [
            # The id of a trajectory is step/task/sample, and the number of the sample is shown.
            sample.trajectory.rpartition("/")[2],
            sample.node,
            str(sample.turn),
            sample.agent,
            f"{sample.reward:g}",
            *(f"{float(statistics.score[row]):g}" for statistics in groups.values()),
            f"{low:+.4f}" if low == high else f"{low:+.4f} … {high:+.4f}",
        ]
        if has_removal:
            cells.append(_signed(sample.scores.get("removal")))
        if has_replays:
            cells.append(_describe_replay(sample))
        table.add_row(*cells)
    return table


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def _describe_replay(sample: Sample) -> str:
    """Describe how many turns after an alternative were sampled anew, and how many were repeated.

    "" for turns that are no alternatives.
    """
    if not sample.is_alternative:
        return ""
    sampled = int(sample.scores["replay_sampled"])
    recorded = int(sample.scores["replay_recorded"])
    return f"{sampled} sampled, {recorded} repeated"


def _group_name(sample: Sample, peer_columns: Sequence[str]) -> str:
    """Return the values that the turns of a sample's group have in common, besides the task."""
    parts = []
    for column in peer_columns:
        if column == "parent":
            parts.append(f"parent {sample.node.rpartition('.')[0] or 'root'}")
        elif column != "task":
            parts.append(f"{column} {getattr(sample, column)}")
    return ", ".join(parts) or "all"
