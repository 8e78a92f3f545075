"""Training curves: values over the steps of a run, and the study of estimators over a suite's seeds."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from mcore_mas.equations.statistics import mean_interval
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.tables import markdown_table
from rollout.base.files import write_text
from rollout.base.json_files import read_json_lines, read_record
from rollout.records.files import read_trajectories
from rollout.records.grouping import group_pairs, group_trajectories
from rollout.records.trajectory import Status, Trajectory

Metrics = Sequence[
    Mapping[str, float]
]  # of a run, one step after the other; what a step did not measure is absent


class MetricsError(ValueError):
    """Runs cannot be drawn or compared: says which, what is wrong and what to do."""


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run's steps, in order.

    Raises:
        MetricsError: the file is missing, or no line of it is a step's metrics.
    """
    try:
        rows = read_json_lines(path)[0]
    except OSError as error:
        raise MetricsError(
            f"{path}: cannot be read ({error.strerror}); train the run again"
        ) from error
    rows = [row for row in rows if "step" in row]
    if not rows:
        raise MetricsError(
            f"{path}: expected one JSON object with a 'step' per line; train the run again"
        )
    return rows


def curve(metrics: Metrics, key: str) -> pd.Series:
    """The metric `key` by updates done, of each step that has it; a step counts from 0 and is the update it led to."""
    return pd.Series(
        {int(row["step"]) + 1: float(row[key]) for row in metrics if key in row}, dtype=float
    )


def curves_of(metrics: Metrics, group: str, name: str) -> dict[str, pd.Series]:
    """`curve` of `group`/<one>/`name` for each agent or data source that has it."""
    keys = {key for row in metrics for key in row}
    found = sorted(
        filter(None, (re.fullmatch(rf"{group}/(.+)/{name}", key) for key in keys)),
        key=itemgetter(1),
    )
    return {one[1]: curve(metrics, one[0]) for one in found}


def study_stability(runs: Mapping[str, Mapping[str, Any]], outputs: Sequence[Path]) -> None:
    """Compare the estimators of finished `runs` (resolved configs by name), and write .csv or .md by suffix.

    Raises:
        MetricsError: a team was trained with one estimator only, its estimators have other seeds, or a run has not
            finished.
    """
    teams = group_pairs(
        (config["orchestra"]["name"], _arm(name, config)) for name, config in runs.items()
    )
    findings = pd.DataFrame(
        finding for team, own in teams.items() for finding in _compared(team, own)
    )
    texts = {
        ".csv": findings.to_csv(index=False, lineterminator="\n"),
        ".md": _markdown_study(findings),
    }
    for path in outputs:
        write_text(path, texts[path.suffix])


def norms(metrics: Metrics) -> dict[str, float]:
    """Mean and largest gradient norm of each agent over the steps that had one, and the mean A² of its advantages."""
    found: dict[str, float] = {}
    for agent, own in curves_of(metrics, "agent", "grad_norm").items():
        finite = own[own.map(math.isfinite)]
        found |= {f"norm {agent}": finite.mean(), f"largest norm {agent}": finite.max()}
        if len(own) > len(finite):
            found[f"norms not finite {agent}"] = float(len(own) - len(finite))
    for agent, own in curves_of(metrics, "agent", "advantage_second_moment").items():
        found[f"A² {agent}"] = fmean(own)
    return found


def lemma_factors(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Each agent's A² under one (μ, σ) for all of a task: (σ_k² + (μ_k - μ)²) / σ², mean over turns   Lemma 4.2.

    μ and σ (n - 1) are over the trajectories of a group, each with the mean reward of its turns; groups whose
    trajectories are all alike have no σ, and count as 0.
    """
    squares: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        played = [
            [(turn.agent, turn.reward) for turn in t.turns if turn.reward is not None]
            for t in group
            if t.status is Status.COMPLETED
        ]
        votes = pd.Series(
            [fmean(reward for _, reward in turns) for turns in played if turns], dtype=float
        )
        mean, deviation = votes.mean(), votes.std()
        for agent, reward in (turn for turns in played for turn in turns):
            squares[agent].append(((reward - mean) / deviation) ** 2 if deviation > 0 else 0.0)
    return {agent: fmean(own) for agent, own in squares.items()}


def skills(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of each agent: the share of its turns scored `right`, where turns are, and the mean -log p of a sampled token."""
    turns = [turn for t in trajectories if t.status is Status.COMPLETED for turn in t.turns]
    right = group_pairs(
        (turn.agent, turn.scores["right"]) for turn in turns if "right" in turn.scores
    )
    surprise = group_pairs((turn.agent, -logprob) for turn in turns for logprob in turn.logprobs)
    found = {f"skill {agent}": fmean(own) for agent, own in right.items()}
    return found | {f"entropy {agent}": fmean(own) for agent, own in surprise.items()}


def _arm(run: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured of a run, with its estimator and seed."""
    folder = Path(config["results"]) / run
    metrics = [row for row in read_metrics(folder / "train" / "metrics.jsonl") if row["step"] >= 0]
    base, trained = (
        _accuracy(folder / "evaluation" / f"{state}.json") for state in ("base", "trained")
    )
    steps = sorted((folder / "train" / "trajectories").glob("step_*.parquet"))
    played = (
        [group.trajectories for group in group_trajectories(read_trajectories(path))]
        for path in steps
    )
    factors = group_pairs(factor for groups in played for factor in lemma_factors(groups).items())
    found = {"advantage": config["advantage"]["name"], "seed": config["seed"]}
    found |= {"accuracy before": base, "accuracy": trained} | norms(metrics)
    found |= {f"A² under one (μ, σ) {agent}": fmean(own) for agent, own in factors.items()}
    shards = sorted((folder / "evaluation" / "trained").glob("*.parquet"))
    return found | skills(
        [trajectory for shard in shards for trajectory in read_trajectories(shard)]
    )


def _accuracy(path: Path) -> float:
    if not path.is_file():
        raise MetricsError(f"{path}: no such file; evaluate the run first")
    tasks = read_record(path, "tasks")["tasks"]
    return fmean(
        value
        for task in tasks
        for name, value in task["metrics"].items()
        if name.startswith("avg@")
    )


def _compared(team: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each measure of each estimator, and of its difference to the first, over seeds."""
    found = (key for run in runs for key in run if key not in ("advantage", "seed"))
    # what a run has nothing of is unknown, such as the skill of an agent that nobody called; a count is 0
    measures = {key: 0.0 if key.startswith("norms not finite") else math.nan for key in found}
    arms: dict[str, pd.DataFrame] = {
        str(advantage): own.set_index("seed").sort_index()
        for advantage, own in pd.DataFrame([{**measures, **run} for run in runs]).groupby(
            "advantage", sort=False
        )
    }
    first, *others = arms
    if not others:
        raise MetricsError(
            f"team '{team}' was trained with '{first}' only; a study compares at least two estimators"
        )
    for other in others:
        if list(arms[other].index) != list(arms[first].index):
            raise MetricsError(
                f"team '{team}': '{first}' has seeds {list(arms[first].index)}, '{other}' {list(arms[other].index)}; "
                "expected the same"
            )
    for measure in measures:
        values = {name: arm[measure] for name, arm in arms.items()}
        values |= {f"{other} - {first}": values[other] - values[first] for other in others}
        for name, own in values.items():
            if not (known := own.dropna().tolist()):
                continue
            low, high = mean_interval(known, f"{team}/{name}/{measure}")
            row = {"value": fmean(known), "ci_low": low, "ci_high": high, "seeds": len(known)}
            yield {"team": team, "advantage": name, "measure": measure} | row


def _markdown_study(findings: pd.DataFrame) -> str:
    """A table per team: a line per measure, a column per estimator and per difference, intervals in brackets."""
    seeds = findings.groupby("team")["seeds"].transform("max")
    numbers = (
        findings[["value", "ci_low", "ci_high", "seeds"]].assign(all=seeds).itertuples(index=False)
    )
    cells = [
        f"{value:.3g} [{low:.3g}, {high:.3g}]" + (f" of {own} seeds" if own < most else "")
        for value, low, high, own, most in numbers
    ]
    teams = []
    for team, own in findings.assign(cell=cells, most=seeds).groupby("team", sort=False):
        table = (
            own.pivot_table("cell", "measure", "advantage", aggfunc="first", sort=False)
            .fillna("")
            .reset_index()
        )
        teams.append((team, own["most"].iloc[0], markdown_table(table)))
    return render_page("study.md.jinja", teams=teams)
