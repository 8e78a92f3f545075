"""The settings of docs/coming_from.md, in place of another trainer's, compose and are those of the run."""

import re
from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve

PAGE = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text(encoding="utf-8")
CELLS = [line.split("|")[3].strip() for line in PAGE.splitlines() if line.count("|") == 4]
ALONE = "trainer.group_size=1"  # a tree takes the place of a group
TREE = ["recipe=at_grpo", ALONE]
WITH = {  # what else a setting needs
    "advantage=gae": [f"policies.{name}.critic={{lr: 1.0e-5}}" for name in ("solver", "verifier")],
    "engine.tp": ["engine=sglang"],
    "filter.name": ["recipe=dapo"],
    "filter.resample": ["recipe=dapo"],
    "policies.verifier.pp": ["cold_start.base.layers=4"],
    "recipe": [ALONE],
    "reward.name=coach": ["coach=openai", "coach.model=judge"],
    "reward.name=tree_shaping": TREE,
    "trainer.branching.alpha": TREE,
    "trainer.branching.select": TREE,
    "trainer.branching.width": TREE,
}
PLAIN = """
defaults:
  - override /team: {team}
run: plain
cold_start: null
data: {{generator: arithmetic, train: 40, validation: 8, test: 8}}
policy_defaults: {{model: models/any, lr: 1.0e-6}}
engine: {{max_length: 2048}}
trainer: {{steps: 2, tasks_per_step: 2, group_size: 2}}
evaluation: {{samples: 2}}
retriever: {{urls: ["http://127.0.0.1:8000"]}}
"""


def overrides() -> list[str]:
    spans = [span for cell in CELLS for span in re.findall(r"`([^`]+)`", cell)]
    return sorted({span for span in spans if re.fullmatch(r"[a-z_.]+=[\w./-]+", span)})


def test_the_page_has_overrides() -> None:
    assert len(overrides()) > 40
    assert {"trainer.group_size=8", "advantage=drmas", "loss.kl.where=reward"} <= set(overrides())


@pytest.mark.parametrize("override", overrides())
def test_every_override_of_the_page_composes_to_what_it_says(override: str, tmp_path: Path) -> None:
    key, _, value = override.partition("=")
    words = ["experiment=demo_math", *WITH.get(override, WITH.get(key, [])), override]
    if key in ("team", "sharing"):  # of an experiment without policies of its own
        (tmp_path / "experiment").mkdir()
        plain = PLAIN.format(team=value if key == "team" else "solver_verifier")
        (tmp_path / "experiment" / "plain.yaml").write_text(plain)
        words = ["experiment=plain"]
        if key == "sharing":
            words.append(override)
    at: object = resolve(words, tmp_path)
    if "." in key:  # others name a group of settings
        for part in key.split("."):
            assert isinstance(at, dict)
            at = at[part]
        assert at == yaml.safe_load(value) or at == float(value)
