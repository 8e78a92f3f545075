"""Self-play in poker from a cold start: the strategy approaches an equilibrium."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_mas.evaluation.evaluate import evaluate
from mcore_mas.reports.charts import write_charts
from mcore_mas.training.train import train
from tests.support.in_process import training_here
from tests.support.run_folder import cold_started_run, metrics_of

# Always betting, where policies end that do not read their card, is exploited by 1/3.
BOUND = 0.15
# In Leduc poker, random actions are exploited by 2.37.
LEDUC_BOUND = 1.8
LEDUC = (
    "env.name=leduc_poker",
    "data.generator=leduc_poker",
    "data.train=120",
    "data.validation=24",
    "trainer.tasks_per_step=24",
    "trainer.group_size=16",
    "trainer.validation_samples=1",
    "trainer.steps=60",
    "trainer.validate_every=30",
    "cold_start.check_tasks=24",
)


@pytest.mark.slow
@pytest.mark.multirank
def test_self_play_is_exploited_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cold_started_run(
        tmp_path, "trainer.steps=100", "trainer.validate_every=25", experiment="demo_poker"
    )
    config = run / "config.yaml"
    with training_here(monkeypatch):
        train(config)

    rows = [row for row in metrics_of(run) if "validation/exploitability" in row]
    exploitabilities = [row["validation/exploitability"] for row in rows]
    print(exploitabilities)
    assert exploitabilities[0] > 2 * BOUND
    assert exploitabilities[-1] < BOUND
    assert min(row["validation/legal_probability"] for row in rows) > 0.95

    scores_file = run / "evaluation" / "trained.json"
    evaluate(config, "trained", scores_file)
    scores = json.loads(scores_file.read_text())
    assert scores["strategy"]["exploitability"] == pytest.approx(exploitabilities[-1], abs=1e-3)
    assert scores["strategy"]["legal_probability"] > 0.95
    # A second evaluation plays no game, and measures the strategy again.
    assert evaluate(config, "trained", scores_file)["strategy"] == pytest.approx(
        scores["strategy"], abs=1e-3
    )

    page = tmp_path / "charts.html"
    write_charts({"demo_poker": run / "train" / "metrics.jsonl"}, page)
    assert "exploitability, in points per game" in page.read_text()


@pytest.mark.slow
@pytest.mark.multirank
def test_self_play_in_leduc_poker_is_exploited_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cold_started_run(tmp_path, *LEDUC, experiment="demo_poker")
    with training_here(monkeypatch):
        train(run / "config.yaml")
    exploitabilities = [
        row["validation/exploitability"]
        for row in metrics_of(run)
        if "validation/exploitability" in row
    ]
    print(exploitabilities)
    assert exploitabilities[0] > 2.0
    assert exploitabilities[-1] < LEDUC_BOUND
