"""Study of estimators or other settings: trainings of the same teams, compared over the seeds of a suite.

`study_stability` writes the study. Its measures are `norm_measures`, `validation_measures`,
`squared_advantages_by_agent` and `skill_measures`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.costs import sampled_tokens
from mcore_mas.reports.curves import curve, curves_of
from mcore_mas.reports.evaluation_files import read_task_metrics
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.step_metrics import Metrics, MetricsError, read_metrics
from mcore_mas.reports.tables import markdown_table
from rollout.base.files import write_text
from rollout.records.files import read_trajectories
from rollout.records.grouping import group_pairs, group_trajectories
from rollout.records.trajectory import Status, Trajectory, Turn


def study_stability(
    runs: Mapping[str, Mapping[str, Any]],
    base_evaluation_owner: Mapping[str, str],
    outputs: Sequence[Path],
) -> None:
    """Write a study that compares the estimators of each team's trainings over their seeds.

    Runs with the same orchestra are one team, which has the orchestra's name. If a team has one
    estimator, or several runs with the same estimator and seed, its runs are compared by their names
    without the seed.

    Args:
        runs: resolved configs of finished runs by name.
        base_evaluation_owner: for each run, the run that has the evaluation of its untrained team.
        outputs: files to write, .csv or .md.

    Raises:
        MetricsError: the runs of a team have only one setting, its settings have different seeds, or
            a run has not been trained and evaluated.
    """
    runs_by_orchestra = group_pairs(
        (config["orchestra"]["name"], run) for run, config in runs.items()
    )
    rows: list[dict[str, Any]] = []
    for orchestra, names in runs_by_orchestra.items():
        measured_runs = _measure_runs({run: runs[run] for run in names}, base_evaluation_owner)
        rows += _compare(orchestra, measured_runs)

    findings = pd.DataFrame(rows)
    texts = {
        ".csv": findings.to_csv(index=False, lineterminator="\n"),
        ".md": _markdown_study(findings),
    }
    for path in outputs:
        write_text(path, texts[path.suffix])


def norm_measures(metrics: Metrics) -> dict[str, float]:
    """Return measures of each agent's gradient norms and advantages over the steps of a run.

    The measures of an agent are the mean and the maximum of its finite gradient norms, the number
    of norms that are not finite (if there are any), its mean share of the gradient of a shared
    policy, and the mean square A² of its advantages.
    """
    measures: dict[str, float] = {}
    for agent, norms in curves_of(metrics, "agent", "grad_norm").items():
        finite = norms[norms.map(math.isfinite)]
        measures[f"norm {agent}"] = finite.mean()
        measures[f"largest norm {agent}"] = finite.max()
        if len(norms) > len(finite):
            measures[f"norms not finite {agent}"] = float(len(norms) - len(finite))
    for agent, shares in curves_of(metrics, "agent", "gradient_share").items():
        measures[f"share of the gradient {agent}"] = shares.mean()
    for agent, moments in curves_of(metrics, "agent", "advantage_second_moment").items():
        measures[f"A² {agent}"] = fmean(moments)
    return measures


def validation_measures(metrics: Metrics) -> dict[str, float]:
    """Return the highest validation accuracy of a training, and how far it has fallen at the end.

    {} if the training has been validated less than twice.
    """
    accuracies = curve(metrics, "validation/accuracy")
    if len(accuracies) < 2:
        return {}
    highest = accuracies.max()
    return {
        "highest validation accuracy": highest,
        "fall of the validation accuracy": highest - accuracies.iloc[-1],
    }


def squared_advantages_by_agent(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the mean squared advantage A² of each agent if one (μ, σ) normalises all agents of a task.

    By Lemma 4.2 of Dr. MAS (arXiv 2602.08847), A² of agent k is (σ_k² + (μ_k - μ)²) / σ², computed
    here as a mean over turns. μ and σ (with n - 1) are those of the mean rewards of the completed
    trajectories of a group. The turns of a group count as 0 if its σ is 0, because all its mean
    rewards are equal, or undefined, because it has only one.
    """
    squares: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        completed = [trajectory for trajectory in group if trajectory.status is Status.COMPLETED]
        rewards_by_trajectory = [_agent_rewards(trajectory) for trajectory in completed]
        mean_rewards = [
            fmean(reward for _, reward in rewards) for rewards in rewards_by_trajectory if rewards
        ]
        mean = pd.Series(mean_rewards, dtype=float).mean()
        deviation = pd.Series(mean_rewards, dtype=float).std()
        for rewards in rewards_by_trajectory:
            for agent, reward in rewards:
                square = ((reward - mean) / deviation) ** 2 if deviation > 0 else 0.0
                squares[agent].append(square)
    return {agent: fmean(values) for agent, values in squares.items()}


def _agent_rewards(trajectory: Trajectory) -> list[tuple[str, float]]:
    """Return the agent and the reward of each turn that has a reward."""
    return [(turn.agent, turn.reward) for turn in trajectory.turns if turn.reward is not None]


def skill_measures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the skill and the entropy of each agent over completed trajectories.

    The skill of an agent is the mean score "right" of its turns. This score is a metric of the
    environment's steps, such as those of workflow/studies/codebook.py; without it, as in most
    environments, the agent has no skill. The entropy is the mean negative log-probability of the
    agent's sampled tokens.
    """
    turns: list[Turn] = []
    for trajectory in trajectories:
        if trajectory.status is Status.COMPLETED:
            turns += trajectory.turns

    right = group_pairs(
        (turn.agent, turn.scores["right"]) for turn in turns if "right" in turn.scores
    )
    surprisals = group_pairs((turn.agent, -logprob) for turn in turns for logprob in turn.logprobs)
    return {
        **{f"skill {agent}": fmean(scores) for agent, scores in right.items()},
        **{f"entropy {agent}": fmean(values) for agent, values in surprisals.items()},
    }


def _measure_runs(
    runs: Mapping[str, Mapping[str, Any]], base_evaluation_owner: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each run of a team: its setting, its seed and all its measures.

    Args:
        runs: configs of the team's runs by name.
        base_evaluation_owner: for each run, the run that has the evaluation of its untrained team.
    """
    settings = _settings_of_runs(runs)
    rows = []
    for run, config in runs.items():
        measures = _measure_run(run, base_evaluation_owner[run], config)
        rows.append({"setting": settings[run], "seed": config["seed"], **measures})
    return rows


def _settings_of_runs(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the setting of each run of a team: its estimator, or else its name without the seed.

    The estimators are the settings if there are several, and each has at most one run of a seed.
    Otherwise something else differs between the runs, for example the learning rate.
    """
    estimators = {run: config["advantage"]["name"] for run, config in runs.items()}
    seeds = {run: config["seed"] for run, config in runs.items()}
    is_one_estimator = len(set(estimators.values())) == 1
    has_repeated_seeds = len({(estimators[run], seeds[run]) for run in runs}) < len(runs)
    if is_one_estimator or has_repeated_seeds:
        return {run: run.removesuffix(f"_{seeds[run]}") for run in runs}
    return estimators


def _measure_run(run: str, base_run: str, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures of a run by name.

    Args:
        run: name of the run.
        base_run: name of the run that has the evaluation of its untrained team.
        config: config of the run.
    """
    results = Path(config["results"])
    folder = results / run
    metrics = read_metrics(folder / "train" / "metrics.jsonl")
    train_metrics = [row for row in metrics if row["step"] >= 0]

    # With branching or replays, trajectories also have turns beside their own path, so the mean over
    # turns is not the reward of the path.
    trainer = config["trainer"]
    squared_advantages = {}
    if not trainer["branching"] and not trainer["replays"]:
        squared_advantages = _mean_squared_advantages(folder / "train" / "trajectories")

    return {
        "accuracy before": _read_accuracy(results / base_run / "evaluation" / "base.json"),
        "accuracy": _read_accuracy(folder / "evaluation" / "trained.json"),
        "sampled tokens, thousands": sampled_tokens(train_metrics) / 1000,
        **validation_measures(train_metrics),
        **norm_measures(train_metrics),
        **{f"A² under one (μ, σ) {agent}": mean for agent, mean in squared_advantages.items()},
        **skill_measures(_read_all_trajectories(folder / "evaluation" / "trained")),
    }


def _mean_squared_advantages(folder: Path) -> dict[str, float]:
    """Return the mean of each agent's `squared_advantages_by_agent` over the steps of a training."""
    means_by_agent: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("step_*.parquet")):
        groups = [group.trajectories for group in group_trajectories(read_trajectories(path))]
        for agent, mean in squared_advantages_by_agent(groups).items():
            means_by_agent[agent].append(mean)
    return {agent: fmean(means) for agent, means in means_by_agent.items()}


def _read_all_trajectories(folder: Path) -> list[Trajectory]:
    shards = sorted(folder.glob("*.parquet"))
    return [trajectory for shard in shards for trajectory in read_trajectories(shard)]


def _read_accuracy(path: Path) -> float:
    """Return the mean avg@k over the tasks of an evaluation; tasks without a score are left out."""
    if not path.is_file():
        raise MetricsError(f"{path}: no such file; evaluate the run first")
    accuracies: list[float] = []
    for metrics in read_task_metrics(path).values():
        accuracies += [value for name, value in metrics.items() if name.startswith("avg@")]
    if not accuracies:
        raise MetricsError(
            f"{path}: no task has a score; see why all replies failed, and evaluate again"
        )
    return fmean(accuracies)


def _compare(team: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean of each measure over seeds, with its 95 % interval.

    Each measure has a row for each setting, and one for each later setting minus the first. A row is
    left out if no seed has a value for it.

    Args:
        team: name of the team: that of its orchestra.
        runs: rows of `_measure_runs`.

    Raises:
        MetricsError: there is only one setting, or their seeds differ.
    """
    # Measures of all runs, each with the value that stands for it in a run that lacks it. A run lacks
    # measures of agents that were never called; these values are unknown (NaN). A run whose norms are
    # all finite lacks "norms not finite", a count that is 0 then.
    default_values: dict[str, float] = {}
    for run in runs:
        for measure in run:
            if measure not in ("setting", "seed"):
                is_count = measure.startswith("norms not finite")
                default_values[measure] = 0.0 if is_count else math.nan

    measured = pd.DataFrame([{**default_values, **run} for run in runs])
    by_setting: dict[str, pd.DataFrame] = {
        str(setting): rows.set_index("seed").sort_index()
        for setting, rows in measured.groupby("setting", sort=False)
    }
    first, *others = by_setting
    _check_pairs(team, by_setting)

    for measure in default_values:
        columns = {setting: rows[measure] for setting, rows in by_setting.items()}
        for other in others:
            columns[f"{other} - {first}"] = columns[other] - columns[first]
        for name, column in columns.items():
            values = column.dropna().tolist()
            if not values:
                continue
            low, high = mean_interval(values, f"{team}/{name}/{measure}")
            yield {
                "team": team,
                "setting": name,
                "measure": measure,
                "value": fmean(values),
                "ci_low": low,
                "ci_high": high,
                "seeds": len(values),
            }


def _check_pairs(team: str, by_setting: Mapping[str, pd.DataFrame]) -> None:
    """Check that there are several settings with the same seeds, so that seeds can be paired."""
    first, *others = by_setting
    if not others:
        raise MetricsError(
            f"the team with orchestra '{team}' has only the setting '{first}', and a study compares at least two; "
            "add runs with another estimator, or with another name, and the same seeds"
        )
    first_seeds = list(by_setting[first].index)
    for other in others:
        seeds = list(by_setting[other].index)
        if seeds != first_seeds:
            raise MetricsError(
                f"the team with orchestra '{team}': '{first}' has seeds {first_seeds}, '{other}' {seeds}; expected "
                "the same"
            )


def _markdown_study(findings: pd.DataFrame) -> str:
    """Return a table for each team: a row per measure, a column per setting and per difference of two settings.

    A cell has the mean and, in brackets, its 95 % interval. A cell with fewer seeds than another cell
    of the team also has the number of its seeds.
    """
    team_seeds = findings.groupby("team")["seeds"].transform("max")
    cells = []
    for finding, most_seeds in zip(findings.to_dict("records"), team_seeds, strict=True):
        cell = "{value:.3g} [{ci_low:.3g}, {ci_high:.3g}]".format_map(finding)
        if finding["seeds"] < most_seeds:
            cell += f" of {finding['seeds']} seeds"
        cells.append(cell)

    teams = []
    findings = findings.assign(cell=cells, team_seeds=team_seeds)
    for team, rows in findings.groupby("team", sort=False):
        table = rows.pivot_table(
            values="cell", index="measure", columns="setting", aggfunc="first", sort=False
        )
        text = markdown_table(table.fillna("").reset_index())
        teams.append((team, rows["team_seeds"].iloc[0], text))
    return render_page("study.md.jinja", teams=teams)
