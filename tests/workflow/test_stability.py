"""A study says of runs what their files say."""

import csv
import json
import math
from pathlib import Path

import pytest

from mcore_mas.reports.curves import MetricsError, stability, study_stability
from tests.workflow.test_dag import planned


def rows(norms: list[float], moments: list[float]) -> list[dict[str, float]]:
    return [
        {"step": i, "agent/a/grad_norm": norm, "agent/a/advantage_second_moment": moment}
        for i, (norm, moment) in enumerate(zip(norms, moments, strict=True))
    ]


def test_measures_by_hand() -> None:
    norms = [1.0, 1.0, 2.0, 1.0, 1.0, 2.9, 3.5, math.nan]
    found = stability(rows(norms, [1.0] * 4 + [3.0] * 4))
    # after five norms: 2.9 is not above three times the median 1, 3.5 is, and what is not finite always
    assert found == {"spikes": 2.0, "largest norm / median": 3.5, "A² a": 2.0}


def test_a_step_without_a_gradient_counts_only_its_moment() -> None:
    table = rows([1.0] * 6, [0.5] * 6)
    del table[3]["agent/a/grad_norm"]
    assert stability(table) == {"spikes": 0.0, "largest norm / median": 1.0, "A² a": 0.5}


def make(results: Path, advantage: str, seed: int, accuracy: float) -> tuple[str, dict]:
    name = f"{advantage}_{seed}"
    folder = results / name
    (folder / "train").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    lines = rows([1.0] * 6 + [9.0 if advantage == "grpo" else 1.0], [2.0] * 7)
    (folder / "train" / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": -1}, *lines])))
    for state, value in (("base", 0.25), ("trained", accuracy)):
        tasks = {"tasks": [{"metrics": {"avg@2": value, "pass@2": 1.0}}, {"metrics": {"avg@2": value}}]}
        (folder / "evaluation" / f"{state}.json").write_text(json.dumps(tasks))
    config = {
        "run": name,
        "results": str(results),
        "seed": seed,
        "advantage": {"name": advantage},
        "orchestra": {"name": "duo"},
    }
    return name, config


def test_estimators_are_compared_by_seed(tmp_path: Path) -> None:
    accuracies = {("grpo", 1): 0.5, ("grpo", 2): 0.7, ("drmas", 2): 0.8, ("drmas", 1): 0.7}
    runs = dict(make(tmp_path, advantage, seed, value) for (advantage, seed), value in accuracies.items())
    outputs = [tmp_path / "study.csv", tmp_path / "study.md"]
    study_stability(runs, outputs)
    table = {(row["measure"], row["advantage"]): row for row in csv.DictReader(outputs[0].open())}
    assert float(table["accuracy", "grpo"]["value"]) == pytest.approx(0.6)
    gain = table["accuracy", "drmas - grpo"]
    assert float(gain["value"]) == pytest.approx(0.15)  # 0.2 and 0.1
    # Student's t of two seeds: 12.706 standard errors of 0.05
    half = 12.7062 * 0.05
    assert (float(gain["ci_low"]), float(gain["ci_high"])) == (pytest.approx(0.15 - half), pytest.approx(0.15 + half))
    assert float(table["spikes", "drmas - grpo"]["value"]) == -1.0
    assert float(table["accuracy before", "grpo"]["value"]) == 0.25
    text = "\n".join(" ".join(line.split()) for line in outputs[1].read_text().splitlines())
    assert "**duo**, 2 seeds" in text
    assert "| spikes | 1 [1, 1] | 0 [0, 0] | -1 [-1, -1] |" in text


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    runs = dict(make(tmp_path, "grpo", seed, 0.5) for seed in (1, 2))
    with pytest.raises(MetricsError, match="team 'duo' was trained with 'grpo' only"):
        study_stability(runs, [])
    runs |= dict([make(tmp_path, "drmas", 1, 0.5)])
    with pytest.raises(MetricsError, match=r"'grpo' has seeds \[1, 2\], 'drmas' \[1\]; expected the same"):
        study_stability(runs, [])
    (tmp_path / "drmas_1" / "evaluation" / "base.json").unlink()
    with pytest.raises(MetricsError, match=r"base.json: no such file; evaluate the run first"):
        study_stability(runs, [])


def test_the_study_is_a_target_and_shares_cold_starts(tmp_path: Path) -> None:
    suite = {
        "suite": "small",
        "share_cold_starts": True,
        "grid": {"axes": {"experiment": ["demo_math"], "advantage": ["grpo", "drmas"], "seed": [1, 2]}},
    }
    jobs = planned(tmp_path, suite, target="study_stability")
    assert jobs["study_stability"] == 1
    assert (jobs["train"], jobs["bootstrap"], jobs["make_base_model"]) == (4, 2, 2)
    assert "report" not in jobs
