"""The team of docs/own_team.md with the installed package: composed by name, refused if mistyped, trained."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from mcore_mas.cli.suite_command import snakemake_arguments
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from rollout.teams.roles import ROLES
from tests.support.run_folder import make_run

ROOT = Path(__file__).parents[2]
SOURCES = ("mcore_mas", "rollout", "retrieval", "configs", "workflow")
SMALL = [
    "data={train: 4, validation: 2, test: 2}",
    "engine={max_length: 512, slots: 8}",
    "trainer={steps: 2, tasks_per_step: 2, group_size: 2, microbatch_tokens: 512, checkpoint_every: 2}",
    "agents={drafter: {max_tokens: 8}, editor: {max_tokens: 8}}",
    "evaluation.samples=1",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the package from a wheel."""
    source = tmp_path_factory.mktemp("source")
    site = tmp_path_factory.mktemp("site")
    for folder in SOURCES:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (source / "docs").mkdir()
    for file in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "docs/published.yaml",
        "docs/tables.md",
    ):
        shutil.copy(ROOT / file, source / file)
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, source], check=True
    )
    return site


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the page's files, each of which begins with its path in a comment."""
    text = (ROOT / "docs" / "own_team.md").read_text(encoding="utf-8")
    for body in re.findall(r"```(?:python|yaml)\n(.*?)```", text, flags=re.DOTALL):
        match = re.search(r"^# (\S+\.(?:py|yaml))$", body, flags=re.MULTILINE)
        if match:
            path = tmp_path / "project" / match[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
    return tmp_path / "project"


@pytest.fixture
def restored_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore import paths, modules and roles after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    roles = dict(ROLES)
    yield
    ROLES.clear()
    ROLES.update(roles)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `mcore-mas run` of the installed package in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mcore_mas", "run", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.multirank
def test_the_pages_team_trains_in_an_empty_folder(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    model = make_run(tmp_path) / "base"
    suite = {
        "suite": "own",
        "experiments": {"mine": ["experiment=my_relay", f"policy_defaults.model={model}", *SMALL]},
    }
    (project / "own.yaml").write_text(yaml.safe_dump(suite))
    completed = run(installed, project, "own.yaml", "results/mine/train/done.json")
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-6000:]
    config = yaml.safe_load((project / "results/mine/config.yaml").read_text())
    assert config["env"] == {"name": "my_pkg.worlds:near", "options": {"scale": 20}, "workers": 0}
    assert {agent["policy"] for agent in config["agents"].values()} == {"shared"}
    table = pq.read_table(project / "results/mine/train/trajectories/step_000001.parquet")
    agents = set()
    for turns in table["turns"].to_pylist():
        agents |= {turn["agent"] for turn in turns}
    assert agents == {"drafter", "editor"}


@pytest.mark.slow
def test_the_package_has_its_types_pages_and_dependencies(installed: Path) -> None:
    (dist_info,) = installed.glob("mcore_mas-*.dist-info")
    metadata = (dist_info / "METADATA").read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in metadata
    assert "\n# mcore-mas\n" in metadata
    assert "Requires-Dist: torch<3,>=" in metadata
    assert "Provides-Extra: gpu" in metadata
    assert (installed / "mcore_mas" / "py.typed").is_file()
    assert not {"workflow", "configs"} & {path.name for path in installed.iterdir()}
    shipped = installed / "mcore_mas" / "shipped"
    for file in (
        "configs/schema/run.json",
        "configs/config.yaml",
        "workflow/Snakefile",
        "workflow/suites/demo.yaml",
    ):
        assert (shipped / file).is_file(), file

    def output_of(code: str) -> str:
        completed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=dist_info,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    # Messages name the pages of the package by their paths.
    message = output_of(
        "import mcore_mas; "
        "print(mcore_mas.resolve_page_paths('no (docs/tables.md, /a/docs/tables.md)'))"
    )
    assert message == f"no ({shipped}/docs/tables.md, /a/docs/tables.md)\n"
    assert (shipped / "docs/tables.md").is_file()
    experiment_count = output_of(
        "from mcore_mas.config.experiments import experiments; print(len(experiments()))"
    )
    assert int(experiment_count) > 50


@pytest.mark.slow
def test_configs_may_be_in_another_folder_and_the_workflow_is_in_the_package(
    installed: Path, project: Path
) -> None:
    other_folder = project.parent / "other"
    other_folder.mkdir()
    for name in ("configs", "my_pkg"):
        (project / name).rename(other_folder / name)
    make_tiny_model(project / "model")
    suite = "suite: own\nexperiments: {mine: [experiment=my_relay, policy_defaults.model=model]}\n"
    (project / "my_suite.yaml").write_text(suite)
    completed = run(
        installed,
        project,
        "my_suite.yaml",
        "--config-dir",
        "../other/configs",
        "--dry-run",
        "--quiet",
        "rules",
    )
    assert completed.returncode == 0, completed.stderr
    # Snakemake prints the path of the profile that it uses.
    assert str(installed / "mcore_mas" / "shipped" / "workflow") in completed.stderr
    assert not (project / "results").exists()


def test_a_users_experiment_is_loaded_by_its_name(
    project: Path, restored_imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert load_suite("my_relay").runs["my_relay"]["env"]["name"] == "my_pkg.worlds:near"
    config_dirs = [
        argument
        for argument in snakemake_arguments("my_relay", ["-n"], None)
        if argument.startswith("config_dir=")
    ]
    assert config_dirs == [f'config_dir="{project / "configs"}"']

    (project / "configs").rename(project / "mine")
    assert list(load_suite("my_relay", config_dir=Path("mine")).runs) == ["my_relay"]
    assert "my_relay" in load_suite("my_suite.yaml", config_dir=Path("mine")).runs
    for suite in ("my_relay", "my_suite.yaml"):
        for function in (load_suite, snakemake_arguments):
            with pytest.raises(SuiteError, match=r"config_dir: .*/mien is not a folder"):
                function(suite, [], Path("mien"))
    message = r"my_rely: no such file, and no experiment of this name .*; nearest: my_relay"
    with pytest.raises(SuiteError, match=message):
        load_suite("my_rely", config_dir=Path("mine"))


@pytest.mark.slow
def test_a_mistake_ends_the_command_with_one_line_before_any_job(
    installed: Path, project: Path
) -> None:
    replace_text(project / "my_suite.yaml", "=my_relay", "=my_rely")
    completed = run(installed, project, "my_suite.yaml")
    assert completed.returncode != 0
    lines = [
        line
        for line in completed.stderr.splitlines()
        if not line.startswith("Using workflow specific profile")
    ]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: run 'my_relay': "), lines
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "my_suite.yaml",
            "=my_relay",
            "=my_rely",
            "run 'my_relay': .*no experiment 'my_rely' in the configs; nearest",
        ),
        (
            "my_suite.yaml",
            "experiments:",
            "config_dir: cfg\nexperiments:",
            "config_dir: .*/cfg is not a folder",
        ),
        (
            "configs/experiment/my_relay.yaml",
            "steps:",
            "stepz:",
            "run 'my_relay': .*trainer.stepz: unknown key",
        ),
        (
            "configs/experiment/my_relay.yaml",
            "relay\n",
            "rely\n",
            "no team 'rely' in the configs; nearest: relay",
        ),
        ("configs/experiment/my_relay.yaml", "data: {", "data: [{", "not YAML .*my_relay.yaml"),
        (
            "configs/team/relay.yaml",
            "teams:relay",
            "teams:rely",
            "orchestra 'my_pkg.teams:rely' cannot be imported",
        ),
        ("configs/team/relay.yaml", "scale", "scales", "scales"),
        (
            "my_pkg/worlds.py",
            "scale: float = 10.0",
            "",
            "env 'my_pkg.worlds:near' cannot be imported",
        ),
    ],
)
def test_every_mistake_is_reported_in_one_line(
    project: Path, restored_imports: None, file: str, old: str, new: str, message: str
) -> None:
    replace_text(project / file, old, new)
    with pytest.raises(SuiteError, match=message) as refusal:
        Suite.load(yaml.safe_load((project / "my_suite.yaml").read_text()), project)
    assert "\n" not in str(refusal.value)


def replace_text(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
