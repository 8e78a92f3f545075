"""How steadily and how well estimators train the same team: gradient spikes, moments and accuracy over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mcore_mas.equations.statistics import SpikeMonitor, bootstrap_interval
from rollout.base.files import write_text

SPIKE_FACTOR = 3.0  # times the running median; runs of some dozen steps on a tiny model have no larger ones to count


class StudyError(ValueError):
    """Runs cannot be compared: says which, what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One measure of one estimator, or of the difference of two, over seeds."""

    team: str  # orchestra
    advantage: str  # an estimator, or "<one> - <first>", paired by seed
    measure: str
    value: float  # mean over seeds
    ci_low: float  # 95 % bootstrap interval over seeds
    ci_high: float
    seeds: int


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    team: str
    advantage: str
    seed: int
    measures: Mapping[str, float]


def study(runs: Mapping[str, Mapping[str, Any]], outputs: Sequence[Path]) -> None:
    """Compare the estimators of finished `runs` (resolved configs by name), and write .csv or .md by suffix.

    Raises:
        StudyError: a team was trained with one estimator only, its estimators have other seeds, or a run has not
            finished.
    """
    measured = [_measure(name, config) for name, config in runs.items()]
    findings = [finding for team in dict.fromkeys(run.team for run in measured) for finding in _compare(team, measured)]
    writers: dict[str, Callable[[Sequence[Finding]], str]] = {".csv": to_csv, ".md": to_markdown}
    for path in outputs:
        write_text(path, writers[path.suffix](findings))


def measures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a run's metrics say of its training, by name; `rows` are its steps in order.

    `spikes`: gradient norms of agents above `SPIKE_FACTOR` times their running median, or not finite.
    `largest norm / median`: the largest over all agents. `A² <agent>`: the mean second moment of the agent's
    advantages, which under a common (μ, σ) grows by (σ_k² + (μ_k - μ)²) / σ²   Dr. MAS, arXiv 2602.08847, Lemma 4.2.
    """
    found = {"spikes": 0.0, "largest norm / median": 0.0}
    for agent in _agents(rows):
        norms = [row[f"agent/{agent}/grad_norm"] for row in rows if f"agent/{agent}/grad_norm" in row]
        monitor = SpikeMonitor(SPIKE_FACTOR)
        found["spikes"] += sum(monitor.observe(norm) for norm in norms)
        finite = [norm for norm in norms if math.isfinite(norm)]
        if finite:
            found["largest norm / median"] = max(found["largest norm / median"], max(finite) / median(finite))
        moments = [row[f"agent/{agent}/advantage_second_moment"] for row in rows if _moment(agent) in row]
        found[f"A² {agent}"] = fmean(moments)
    return found


def _moment(agent: str) -> str:
    return f"agent/{agent}/advantage_second_moment"


def _agents(rows: Sequence[Mapping[str, float]]) -> list[str]:
    tail = "/advantage_second_moment"
    return sorted({key.split("/")[1] for row in rows for key in row if key.startswith("agent/") and key.endswith(tail)})


def _measure(name: str, config: Mapping[str, Any]) -> _Run:
    folder = Path(config["results"]) / name
    metrics = folder / "train" / "metrics.jsonl"
    if not metrics.is_file():
        raise StudyError(f"{metrics}: no such file; train run '{name}' first")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    base, trained = (_accuracy(folder / "evaluation" / f"{state}.json") for state in ("base", "trained"))
    found = {"accuracy before": base, "accuracy": trained} | measures([row for row in rows if row["step"] >= 0])
    return _Run(name, config["orchestra"]["name"], config["advantage"]["name"], config["seed"], found)


def _accuracy(path: Path) -> float:
    if not path.is_file():
        raise StudyError(f"{path}: no such file; evaluate the run first")
    return fmean(score for task in json.loads(path.read_text(encoding="utf-8"))["tasks"] for score in task["scores"])


def _compare(team: str, runs: Sequence[_Run]) -> list[Finding]:
    arms: dict[str, dict[int, Mapping[str, float]]] = {}
    for run in runs:
        if run.team == team:
            arms.setdefault(run.advantage, {})[run.seed] = run.measures
    first, *others = arms
    if not others:
        raise StudyError(f"team '{team}' was trained with '{first}' only; a study compares at least two estimators")
    for advantage in others:
        if arms[advantage].keys() != arms[first].keys():
            raise StudyError(
                f"team '{team}': '{first}' has seeds {sorted(arms[first])}, '{advantage}' {sorted(arms[advantage])}; "
                "expected the same"
            )
    findings = []
    for measure in dict.fromkeys(key for arm in arms.values() for own in arm.values() for key in own):
        values = {name: [own.get(measure, 0.0) for _, own in sorted(arm.items())] for name, arm in arms.items()}
        findings += [_finding(team, name, measure, own) for name, own in values.items()]
        for name in others:
            gaps = [one - other for one, other in zip(values[name], values[first], strict=True)]
            findings.append(_finding(team, f"{name} - {first}", measure, gaps))
    return findings


def _finding(team: str, advantage: str, measure: str, values: Sequence[float]) -> Finding:
    low, high = bootstrap_interval(values, f"{team}/{advantage}/{measure}")
    return Finding(
        team=team,
        advantage=advantage,
        measure=measure,
        value=fmean(values),
        ci_low=low,
        ci_high=high,
        seeds=len(values),
    )


def to_csv(findings: Sequence[Finding]) -> str:
    """One line per finding."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Finding)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(finding) for finding in findings)
    return out.getvalue()


def to_markdown(findings: Sequence[Finding]) -> str:
    """A table per team: a line per measure, a column per estimator and per difference, intervals in brackets."""
    parts = []
    for team in dict.fromkeys(finding.team for finding in findings):
        own = [finding for finding in findings if finding.team == team]
        columns = list(dict.fromkeys(finding.advantage for finding in own))
        cells = {(f.measure, f.advantage): f"{f.value:.3g} [{f.ci_low:.3g}, {f.ci_high:.3g}]" for f in own}
        lines = [f"**{team}**, {own[0].seeds} seeds", "", "| measure | " + " | ".join(columns) + " |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for measure in dict.fromkeys(finding.measure for finding in own):
            lines.append(f"| {measure} | " + " | ".join(cells[measure, column] for column in columns) + " |")
        parts.append("\n".join(lines))
    note = (
        "Means over seeds with 95 % bootstrap intervals; differences are paired by seed. A spike is an agent's "
        f"gradient norm above {SPIKE_FACTOR:g} times its running median, or not finite."
    )
    return "\n\n".join([*parts, note]) + "\n"
