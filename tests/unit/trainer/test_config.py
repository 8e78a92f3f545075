"""Every shipped config composes, and every mistake is one line that names it."""

from pathlib import Path

import pytest
import yaml

from mcore_mas.config import CONFIGS, ConfigError, RunConfig, resolve

GROUPS = sorted(
    (path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml") if path.parent.name not in ("experiment", "team")
)


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml")))
def test_every_experiment_composes_and_survives_its_file(experiment: str, tmp_path: Path) -> None:
    values = resolve([f"experiment={experiment}"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert RunConfig.load(path).run == experiment
    assert RunConfig.load(path).model_dump(mode="json") == values


@pytest.mark.parametrize(("group", "name"), GROUPS)
def test_every_group_file_composes(group: str, name: str) -> None:
    assert resolve(["experiment=demo_math", f"{group}={name}"])["run"] == "demo_math"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sede=2", "Could not override 'sede'"),
        ("+trainer.stesp=3", "unknown key 'trainer.stesp'; known here: steps, tasks_per_step"),
        ("policies.solver.lr=fast", "policies.solver.lr: Input should be a valid number"),
        ("agents.solver.policy=solvr", "agent 'solver' plays policy 'solvr', which is not defined; policies: solver"),
        ("orchestra.name=chian", "unknown orchestra 'chian'; known: search_team, solver_verifier"),
        ("+orchestra.options.loops=3", "orchestra 'solver_verifier' has no option 'loops'; its options: max_loops"),
        ("advantage.name=drmass", "unknown advantage 'drmass'; known: dr_grpo, drmas, grpo"),
        ("data.generator=null", "data.train is 4000; expected a parquet file of tasks"),
        ("experiment=demo_maths", "Could not find 'experiment/demo_maths'"),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str) -> None:
    base = [] if override.startswith("experiment") else ["experiment=demo_math"]
    with pytest.raises(ConfigError) as caught:
        resolve([*base, override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected a resolved config"):
        RunConfig.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="not YAML"):
        RunConfig.load(tmp_path / "config.yaml")
