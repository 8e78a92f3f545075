"""The experiment demo_distill: one model learns what a vote of three samples answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.pipeline.base_model import make_base_model
from mcore_mas.pipeline.cold_start import bootstrap
from mcore_mas.pipeline.distill import DistillSettings, describe, distill
from mcore_mas.pipeline.prepare import prepare_tasks
from mcore_mas.training.train import train
from tests.support.in_process import training_here


@pytest.mark.slow
@pytest.mark.multirank
def test_one_model_is_as_right_as_the_vote_at_a_third_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "demo_distill"
    run.mkdir()
    config = run / "config.yaml"
    config.write_text(yaml.safe_dump(resolve(["experiment=demo_distill", f"results={tmp_path}"])))
    prepare_tasks(config, run / "tasks")
    make_base_model(config, run / "tasks", run / "base")
    bootstrap(config, run / "base", run / "bootstrap")
    with training_here(monkeypatch):
        train(config)
    team, model = distill(run, tmp_path / "one", DistillSettings(lr=3e-4))
    print("\n".join(describe(team, model)))
    assert model.accuracy >= 0.95 * team.accuracy
    assert model.sampled <= 0.4 * team.sampled
    assert model.read <= 0.4 * team.read
